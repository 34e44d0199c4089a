"""Page 46: compressed gradients, local steps, and what they send."""

import copy
import pickle
import re
from contextlib import nullcontext
from functools import partial
from itertools import islice

import accelerate
import pytest
import send_less
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.lab.audit.command import run_checks
from tests.observer.test_checks import SCRIPTS, observe, text_of
from tests.pages.pages import TUTORIALS, load_module, section, table_rows, transcript

PAGE = TUTORIALS / "46_send_less.md"
TEXT = " ".join(PAGE.read_text().split())
LOSS = load_module(TUTORIALS / "46_loss.py")
HOOK = load_module(TUTORIALS / "46_hook.py")
PROGRAM = load_module(TUTORIALS / "46_send_less.py")
RATES = load_module(TUTORIALS / "46_rates.py")
RESUME = load_module(TUTORIALS / "46_resume.py")
HookType = accelerate.DDPCommunicationHookType


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Tanh(), torch.nn.Linear(16, 12))


def batches(steps: int, dtype=torch.float32) -> list[tuple]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    return [
        (
            torch.randn(8, 24, generator=draw, dtype=dtype),
            torch.randint(12, (8,), generator=draw),
        )
        for _ in range(steps)
    ]


def take_steps(model, data: list, local=None):
    """Train with SGD. Return the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for inputs, labels in data:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if local:
            local.step()
    return optimizer


def are_equal_on_all_ranks(values: torch.Tensor) -> bool:
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values.detach())
    return all(torch.equal(values, each) for each in everyone)


def count_bytes(device):
    """Return, for each method, the counted bytes, the formula's, and if the ranks end equal."""
    steps, every, counts = 10, 4, {}
    for method in send_less.METHODS:
        model = send_less.make_model()
        with recorded() as collectives:
            data = islice(send_less.own_batches(1), steps)
            trained = send_less.train(method, model, data, every)
        counted = sum(each.size for each in collectives if each.name == "all_reduce")
        is_equal = are_equal_on_all_ranks(parameters_to_vector(trained.parameters()))
        counts[method] = counted, PROGRAM.bytes_sent(method, model, steps, every), is_equal
    return dist.get_world_size(), counts


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_method_sends_the_bytes_of_its_formula_and_ends_with_equal_weights(
    together, processes
):
    for connected, counts in together(count_bytes, processes):
        assert connected == processes and list(counts) == send_less.METHODS
        for method, (counted, formula, is_equal) in counts.items():
            assert counted == formula > 0 and is_equal, method


def power_sgd(rank: int) -> dict:
    return {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}


def compare_hooks(device):
    """Return, for each hook, whether raw DDP and Accelerate end with the same bits."""
    cases = {
        "bf16": (default_hooks.bf16_compress_hook, None, {"comm_hook": HookType.BF16}),
        "fp16": (default_hooks.fp16_compress_hook, None, {"comm_hook": HookType.FP16}),
    }
    for rank in (1, 2, 4):
        options = {"comm_hook": HookType.POWER_SGD, "comm_state_option": power_sgd(rank)}
        cases[f"rank {rank}"] = powerSGD_hook.powerSGD_hook, power_sgd(rank), options
    wrapped = default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    cases["in bf16"] = wrapped, power_sgd(4), {**options, "comm_wrapper": HookType.BF16}
    data, found = batches(6), {}
    plain = DistributedDataParallel(network())
    take_steps(plain, data)
    for name, (hook, state, options) in cases.items():
        raw = DistributedDataParallel(network())
        raw.register_comm_hook(state and powerSGD_hook.PowerSGDState(None, **state), hook)
        handler = DistributedDataParallelKwargs(**options)
        prepared = Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(network())
        for model in (raw, prepared):
            take_steps(model, data)
        first, second, third = (
            parameters_to_vector(model.parameters()) for model in (raw, prepared, plain)
        )
        found[name] = torch.equal(first, second), not torch.equal(first, third)
    ignored = DistributedDataParallelKwargs(comm_hook="bf16")
    model = Accelerator(cpu=True, kwargs_handlers=[ignored]).prepare(network())
    return dist.get_world_size(), found, len(model._comm_hooks)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_raw_ddp_and_accelerate_have_the_same_bits_with_each_hook(together, processes):
    for connected, found, hooks_by_name in together(compare_hooks, processes):
        assert connected == processes
        assert found == dict.fromkeys(found, (True, True))
        assert hooks_by_name == 0 and "Accelerate silently ignores a name" in TEXT


def train_locally(device):
    """Return the difference of DiLoCo to DDP and to LocalSGD, and whether the ranks are equal."""
    data, wide = batches(8), batches(8, torch.float64)
    ddp = DistributedDataParallel(network().double())
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network().double())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with send_less.DiLoCo(model, every=1, lr=1.0, momentum=0.0) as outer:
        for inputs, labels in wide:
            for each, optimizer in ((ddp, sgd), (model, inner)):
                F.cross_entropy(each(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            outer.step()
    pairs = zip(ddp.parameters(), model.parameters(), strict=True)
    to_ddp = max((a - b).abs().max().item() for a, b in pairs)

    prepared = accelerator.prepare(network())
    with LocalSGD(accelerator, prepared, 3) as local:
        take_steps(prepared, data, local)
    model = accelerator.prepare(network())
    with send_less.DiLoCo(model, every=3, lr=1.0, momentum=0.0) as local:
        take_steps(model, data, local)
    pairs = zip(prepared.parameters(), model.parameters(), strict=True)
    to_local = max((a - b).abs().max().item() for a, b in pairs)

    torch.manual_seed(dist.get_rank())  # each rank begins with other weights
    model = accelerator.prepare(torch.nn.Linear(24, 12))
    with send_less.DiLoCo(model, every=3) as local:
        take_steps(model, data, local)
    is_equal = are_equal_on_all_ranks(parameters_to_vector(model.parameters()))
    return dist.get_world_size(), to_ddp, to_local, is_equal


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_diloco_without_momentum_is_ddp_or_local_sgd(together, processes):
    for connected, to_ddp, to_local, is_equal in together(train_locally, processes):
        assert connected == processes and is_equal
        # The difference of two weights, and their mean, are rounded.
        assert to_ddp < 1e-14 and to_local < 1e-6


def observe_local_sgd(device):
    """Return facts about Accelerate's LocalSGD: what differs between the ranks after its block."""
    accelerator, model = (
        Accelerator(cpu=True),
        torch.nn.Sequential(network(), torch.nn.BatchNorm1d(12)),
    )
    model = accelerator.prepare(model)
    with LocalSGD(accelerator, model, 2) as local, recorded() as collectives:
        optimizer = take_steps(model, batches(4), local)
    moments = [state["momentum_buffer"].flatten() for state in optimizer.state.values()]
    sizes = [each.size for each in collectives if each.name == "all_reduce"]
    parameters = [parameter.nbytes for parameter in model.parameters()]
    return {
        "weights": are_equal_on_all_ranks(parameters_to_vector(model.parameters())),
        "moments": are_equal_on_all_ranks(torch.cat(moments)),
        "buffers": are_equal_on_all_ranks(model.module[1].running_mean),
        "only parameters": sizes == 2 * parameters,  # and no gradients
    }


def test_local_sgd_averages_the_weights_but_neither_moments_nor_buffers(together):
    expected = {"weights": True, "moments": False, "buffers": False, "only parameters": True}
    assert together(observe_local_sgd, 2) == [expected] * 2


def test_local_sgd_does_nothing_in_one_process_and_refuses_fsdp():
    accelerator = Accelerator(cpu=True)
    assert not LocalSGD(accelerator, network(), 2).enabled
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):

        class Other:
            distributed_type = getattr(accelerate.DistributedType, kind)

        with pytest.raises(NotImplementedError):
            LocalSGD(Other(), network(), 2)


def resume_power_sgd(device):
    """Return how far a resumed run is from an uninterrupted one, by how it is resumed."""

    def make(state):
        model = DistributedDataParallel(network())
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, data):
        for inputs, labels in data:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    data, state = batches(8), powerSGD_hook.PowerSGDState(None, **power_sgd(1))
    model, optimizer = make(state)
    train(model, optimizer, data[:4])
    weights, saved = copy.deepcopy(model.module.state_dict()), pickle.dumps(state)
    is_same_error = are_equal_on_all_ranks(state.error_dict[0])
    train(model, optimizer, data[4:])
    expected, found = parameters_to_vector(model.parameters()), {}
    for how in ("without the state", "with the state", "after a backward pass"):
        state = powerSGD_hook.PowerSGDState(None, **power_sgd(1))
        model, optimizer = make(state)
        if how == "after a backward pass":
            inputs, labels = data[0]
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.zero_grad()
        model.module.load_state_dict(weights)
        if how != "without the state":
            state.__setstate__(pickle.loads(saved).__getstate__())
        train(model, optimizer, data[4:])
        resumed = parameters_to_vector(model.parameters())
        found[how] = (resumed - expected).abs().max().item()
    return dist.get_world_size(), is_same_error, list(found.values())


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_power_sgd_resumes_with_the_same_bits_only_after_a_backward_pass(together, processes):
    for connected, is_same_error, differences in together(resume_power_sgd, processes):
        assert connected == processes and is_same_error == (processes == 1)
        without, early, right = differences
        assert without > 1e-4 and early > 1e-4 and right == 0


def gradients(factors: list[float], clear_after=None, **options) -> list[str]:
    """Return "NaN", "0" or "finite" for the first layer's gradient after each step.

    The loss of each step is multiplied by its factor. The weights never change, as if each step
    was skipped.
    """
    options = {"start_powerSGD_iter": 2, **options}
    state = powerSGD_hook.PowerSGDState(None, **options)
    model = DistributedDataParallel(network())
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    kinds = []
    for step, ((inputs, labels), factor) in enumerate(zip(batches(8), factors, strict=False)):
        (factor * F.cross_entropy(model(inputs), labels)).backward()
        gradient = model.module[0].weight.grad
        finite = bool(gradient.isfinite().all())
        kinds.append("NaN" if not finite else "finite" if gradient.any() else "0")
        model.zero_grad()
        if step == clear_after:
            for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                kept.clear()
    return kinds


def break_power_sgd(device):
    """Return the kinds of gradients after an infinite one, and after one that is 0."""
    infinite, zero = [1, 1, 1, float("inf"), 1, 1, 1], [1, 1, 0, 1, 1, 1]
    found = {}
    for rank in (1, 2, 4):
        of_rank = partial(gradients, matrix_approximation_rank=rank)
        found[f"infinite, rank {rank}"] = of_rank(infinite)[3:]
        found[f"cleared, rank {rank}"] = of_rank(infinite, clear_after=3)[3:]
        found[f"0, rank {rank}"] = of_rank(zero)[2:]
        found[f"epsilon, rank {rank}"] = of_rank(zero, orthogonalization_epsilon=1e-8)[2:]
        cold = of_rank(zero, orthogonalization_epsilon=1e-8, warm_start=False)
        found[f"cold, rank {rank}"] = cold[2:]
    return found


def test_power_sgd_keeps_infinite_gradients_and_breaks_at_gradients_that_are_0(together):
    expected = {}
    for rank in (1, 2, 4):
        expected[f"infinite, rank {rank}"] = ["NaN"] * 4
        expected[f"cleared, rank {rank}"] = ["NaN", *["finite"] * 3]
        recovers = ["0", *["finite"] * 3]
        expected[f"0, rank {rank}"] = ["NaN"] * 4 if rank < 3 else recovers
        expected[f"epsilon, rank {rank}"] = ["0"] * 4 if rank < 3 else recovers
        expected[f"cold, rank {rank}"] = recovers
    assert together(break_power_sgd, 2) == [expected] * 2


def test_the_advice_about_the_start_is_that_of_pytorch():
    advice = " ".join((powerSGD_hook.PowerSGDState.__doc__ or "").split())
    assert "start with 10% of total training steps" in advice
    assert "no less than the number of warm-up steps" in advice
    [quoted] = re.findall(r'compressing too early "(.*?)"', TEXT)
    assert quoted in advice
    assert send_less.PLAIN_STEPS == 2 and "from the third step on, as early as it can" in TEXT


def test_the_recorded_times_have_the_rounds_of_the_program():
    [output] = transcript("send_less_rates").values()
    rounds = load_module(TUTORIALS / "46_step.py").ROUNDS
    assert f"\n{rounds} rounds. Without a limit" in output


def test_the_worked_number_of_the_break_even_is_right():
    saved = PROGRAM.bytes_later("DDP", send_less.make_model())
    saved -= PROGRAM.bytes_later("bf16", send_less.make_model())
    slow, fast = (8e3 * saved / rate for rate in (RATES.RATE * 1e6, 1e9))
    assert f"bf16 saves {saved:,.0f} bytes per step: {slow:.0f} ms at {RATES.RATE} Mbit/s" in TEXT
    assert f"only {fast:.1f} ms at 1 Gbit/s" in TEXT


WRONG_HOOK = """
def summed(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda sent: sent.value()[0])


def main():
"""


def test_the_audit_does_not_see_a_hook_that_forgets_to_divide(tmp_path):
    script = text_of(SCRIPTS["ddp"]).replace("\ndef main():\n", WRONG_HOOK)
    script = script.replace(
        "    optimizer =", "    model.register_comm_hook(None, summed)\n    optimizer ="
    )
    assert "summed)" in script
    assert run_checks(observe(script, tmp_path))[0] == []
    assert "It can't see a hook that forgets to divide" in TEXT


@pytest.mark.parametrize("name", ["send_less", "send_less_rates"])
def test_each_transcript_matches_its_command_and_is_on_the_page(name):
    recorded = transcript(name)
    assert list(recorded) == load_module(TUTORIALS / "40_record.py").RECORDS[name]
    [output] = recorded.values()
    assert set(output.splitlines()) <= set(PAGE.read_text().splitlines())


def recorded_rows(name: str) -> dict[str, list[str]]:
    [output] = transcript(name).values()
    lines = [line for line in output.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in rows}


def losses() -> dict[str, list[str]]:
    [output] = transcript("send_less").values()
    assert output.startswith("2 connected processes, 8 seeds, 2 epochs\n")
    return recorded_rows("send_less")


def test_the_prediction_follows_from_the_recorded_intervals():
    every_row = losses()
    rows = {method: every_row.pop(method) for method in send_less.METHODS}
    worse = {name for name, row in rows.items() if name != "DDP" and float(row[4].split()[0]) > 0}
    few = {name for name, row in rows.items() if float(row[0]) < float(rows["DDP"][0]) / 30}
    assert worse == few | {"DiLoCo"} and few
    assert re.search(r"\*\*Your prediction\*\*: \(c\)", TEXT)
    similar = set(rows) - worse - {"DDP"}
    assert all(float(rows[name][4].split()[-1]) > 0 for name in similar)
    assert similar == {"bf16", "PowerSGD, rank 4", "LocalSGD"}
    assert "bf16, PowerSGD with rank 4 and LocalSGD have intervals that contain 0" in TEXT
    assert list(every_row) == [name for name in LOSS.RUNS if name not in rows]
    for name, row in every_row.items():
        low, high = map(float, row[4].split(" – "))
        is_worse = "DiLoCo" in name and "lr 0.1" not in name
        assert low > 0 if is_worse else low < 0 < high
    assert max(losses().items(), key=lambda item: float(item[1][1]))[0] == "DiLoCo, H = 4"
    for name, text in (
        ("bf16", "half the"),
        ("LocalSGD", "1/16"),
        ("PowerSGD, rank 4", "rank 4: 23.5"),
    ):
        most = rows[name][4].split()[-1]
        shown = rf"8 seeds show no higher loss \(90 % interval: up to \+{most}\)"
        assert re.search(rf"{text}[^;|]*; {shown}", TEXT), name


def test_the_words_about_the_times_follow_from_the_intervals():
    seconds = {"DDP": [2.0] * 7, "a": [1.0] * 7, "b": [3.0] * 7, "c": [1, 1, 1, 2, 3, 3, 3]}
    assert RATES.conclusion(seconds, "Now") == "Now, faster than DDP: a. Slower: b."
    seconds = {"DDP": [2.0] * 7, "a": [1.0] * 7}
    assert RATES.conclusion(seconds, "Now") == "Now, faster than DDP: all. Slower: none."

    [output] = transcript("send_less_rates").values()
    rows = recorded_rows("send_less_rates")
    assert list(rows) == send_less.METHODS and "busy machine" not in output
    for column, when in ((1, "Without a limit"), (4, f"At {RATES.RATE} Mbit/s")):
        listed = re.search(rf"{when}, faster than DDP: (.*)\. Slower: (.*)\.", output).groups()
        for name in send_less.METHODS[1:]:
            faster, slower = (text == "all" or name in text.split("; ") for text in listed)
            low, high = map(float, re.search(r"\((.*) – (.*)\)", rows[name][column]).groups())
            # The table rounds the bounds of the intervals.
            assert (low >= 1) if faster else (high <= 1) if slower else (low <= 1 <= high), name


def test_the_change_is_complete_and_runs(together):
    assert together(with_the_change, 2) == [(2, "bf16_compress_hook")] * 2


def with_the_change(device):
    """Run the added lines of the page's diff. Return the processes, and the hook of the model."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    added = [
        line[1:].strip() for line in diff.splitlines() if line[0] == "+" or "Accelerator(" in line
    ]
    names = {"torch": torch, "options": {}}
    exec("\n".join(added), names)
    model = names["accelerator"].prepare(network())
    take_steps(model, batches(2))
    [[hook, _]] = model._comm_hooks
    return names["accelerator"].num_processes, hook.__name__


def test_runs_are_resumed_with_the_same_bits_and_states_have_the_sizes_of_the_table():
    rows = {row[0]: row[1:] for row in table_rows(PAGE.name, cells=6)}
    weights = sum(weight.nbytes for weight in send_less.make_model().parameters())
    for method in RESUME.METHODS:
        size, with_state, without, without_pass, from_one_file = rows[method]
        assert with_state == "the same bits" and from_one_file == "different"
        assert without == ("the same bits" if method == "LocalSGD" else "different")
        assert without_pass == ("different" if method == "PowerSGD" else "–")
        size = int(size.replace(",", ""))
        if method == "PowerSGD":  # the errors, and Q and P, which are small
            assert weights < size < 1.1 * weights
        else:
            assert size == {"LocalSGD": 0, "DiLoCo": 2 * weights}[method]


def test_local_steps_refuse_a_model_that_is_not_prepared(together):
    assert together(use_unprepared, 2) == [["no_sync", "no_sync"]] * 2


def use_unprepared(device):
    """Return the attribute that each kind of local steps misses on a model without DDP."""
    accelerator, missing = Accelerator(cpu=True), []
    for make in (partial(LocalSGD, accelerator), send_less.DiLoCo):
        try:
            with make(network(), 2):
                pass
        except AttributeError as error:
            missing.append(error.name)
    return missing


def test_the_fractions_of_the_bytes_are_those_of_the_first_table():
    rows = [row for row in table_rows(PAGE.name, cells=5) if row[2] == "to the byte"]
    less = {row[0]: float(row[4]) for row in rows}
    assert f"rank 4: {less['PowerSGD, rank 4']} times fewer bytes" in TEXT
    whole = 1 / (0.1 + 0.9 / less["PowerSGD, rank 4"])
    assert f"1 / (0.1 + 0.9 / {less['PowerSGD, rank 4']}) = {whole:.1f} times fewer" in TEXT
    assert f"| *H* = 16, 1/{less['LocalSGD']:.0f} of the bytes" in TEXT


def test_the_megabytes_of_the_losses_are_those_of_two_epochs():
    model, steps = send_less.make_model(), 2 * (12_000 // (2 * send_less.BATCH))
    for name, row in losses().items():
        method, every, *_ = LOSS.RUNS[name]
        assert row[0] == f"{PROGRAM.bytes_sent(method, model, steps, every) / 1e6:.1f}"


def test_an_outer_optimizer_with_momentum_multiplies_a_steady_movement_by_7():
    model = torch.nn.Linear(1, 1)
    model.no_sync = nullcontext
    shared = send_less.DiLoCo(model, every=1).outer
    [weight, _] = shared.param_groups[0]["params"]
    for _ in range(200):
        before = weight.item()
        weight.grad = torch.full_like(weight, 1e-3)
        shared.step()
    assert (before - weight.item()) / 1e-3 == pytest.approx(7, rel=1e-3)
    assert "is multiplied by 0.7 / (1 − 0.9) = 7" in TEXT


def test_the_answers_are_right():
    rows, columns, rank = 4096, 1024, 8
    assert f"= {rows * columns / ((rows + columns) * rank):.0f} times." in TEXT
    assert f"0.2 + 3 / 50 = {0.2 + 3 / 50:.2f} seconds, instead of {0.2 + 3:g}." in TEXT
    assert "Where it doesn't pay off" in TEXT and section(PAGE.read_text(), "The time")

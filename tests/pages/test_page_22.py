"""Page 22: the methods that equal DDP bit for bit, and the bonus of the exercise."""

import ast
import re
import warnings
from datetime import timedelta
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.ddp.buckets import MIB, assign_buckets, size_limits
from accel_demo.anatomy.ddp.comparison import make_model
from accel_demo.anatomy.ddp.flight_recorder import recorded
from tests.conftest import REPOSITORY, run_ranks
from tests.exercises.wrong_answers import edited
from tests.pages.pages import FIELD, check, load_grader, load_module, rows_below, table_rows

PAGE = "22_ddp.md"
ANSWER = REPOSITORY / "tutorials" / "exercises" / "answers" / "22_unused_parameters.py"


def test_all_methods_equal_ddp_on_two_processes_but_only_some_on_three():
    ladder = [row for row in table_rows(PAGE) if len(row) == 4 and row[1] in ("equal", "different")]
    marks = {name: marks for name, *marks in ladder}
    assert len(marks) == len(ladder) == 15
    whole, *others = ladder
    assert whole == ["one process, all ranks' samples in one batch", *["different"] * 3]
    assert [two for _, two, _, _ in others] == ["equal"] * 14
    assert [name for name, _, three, four in others if (three, four) == ("equal", "equal")] == [
        "times 1/N first, in reverse order from step 2 on",
        "rebuilt by hand, with buckets and hooks",
        "DistributedDataParallel, run again",
        "Accelerate",
        "rebuilt by hand, small buckets (compared with the row above)",
    ]
    # On three ranks, the rings of gloo and of page 21 differ only in the order of two numbers.
    assert [name for name, _, *marks in others if marks == ["equal", "different"]] == [
        "times 1/N first, reverse from step 2, our ring"
    ]
    # These equal DDP only on two and four processes, as dividing by a power of two is exact.
    assert [name for name, _, *marks in others if marks == ["different", "equal"]] == [
        "in reverse order from step 2 on, then divide by N",
        "DistributedDataParallel with `allreduce_hook`",
    ]


def test_ddp_sends_parameters_once_and_gradients_in_every_backward():
    rows = [row for row in table_rows(PAGE) if len(row) == 4 and row[1].startswith("`")]
    wrapped, *steps = rows
    assert wrapped[1] == "`DistributedDataParallel(model)`" and wrapped[3] == "–"
    text = (REPOSITORY / "tutorials" / PAGE).read_text()
    line = next(line for line in text.splitlines() if line.startswith("parameters: "))
    parameters, buffers = (int(word) for word in line.split() if word.isdigit())
    cells = [[cell.replace("–", "0").split(" + ") for cell in row[2:]] for row in steps]
    sent = [[sum(map(int, numbers)) for numbers in row] for row in cells]
    assert sum(map(int, wrapped[2].split(" + "))) >= parameters + buffers
    assert [all_reduced for _, all_reduced in sent] == [0, parameters, 0] * 3
    first, _, _, second, *_ = [broadcast for broadcast, _ in sent]
    assert first == buffers and second > buffers
    assert [broadcast for broadcast, _ in sent[4:]] == [0, 0, buffers, 0, 0]
    assert "Collectives within `optimizer.step()`: 0" in text


def test_the_page_shows_one_bucket_in_step_1_and_the_last_layer_first_from_step_2():
    rows = [row for row in table_rows(PAGE) if len(row) == 3 and row[2].startswith("`")]
    buckets = {step: [bucket for one, _, bucket in rows if one == step] for step in "123"}
    assert len(buckets["1"]) == 1 and buckets["1"][0].startswith("`0.weight` `0.bias`")
    assert len(buckets["2"]) > 1 and buckets["2"] == buckets["3"]
    assert buckets["2"][0].startswith("`4.bias` `4.weight`")


def test_a_bucket_closes_when_it_reaches_its_limit_as_the_answers_say():
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == size_limits(None)[0] == MIB
    layers = [torch.empty(10 * MIB // 4, device="meta") for _ in range(6)]  # 10 MiB each
    buckets = assign_buckets(layers, size_limits(None), range(6))
    assert [10 * len(bucket) for bucket in buckets] == [10, 30, 20]
    sizes = {"4.bias": 40, "4.weight": 1920, "3.bias": 192, "3.weight": 9216, "1.weight": 192}
    sizes |= {"1.bias": 192, "0.bias": 192, "0.weight": 3840}
    tensors = [torch.empty(size // 4, device="meta") for size in sizes.values()]
    for limit, expected in ((0.001, [1960, 9408, 4416]), (0.009, [11368, 4416])):
        buckets = assign_buckets(tensors, size_limits(limit), range(len(tensors)))
        assert [sum(tensors[i].nbytes for i in bucket) for bucket in buckets] == expected


def test_the_gradients_of_the_third_program_fit_in_one_bucket_and_in_three_equal_chunks():
    elements = sum(weight.numel() for weight in make_model(torch.device("cpu")).parameters())
    assert round(4 * elements, -3) == 28_000 < MIB
    assert elements % (3 * 2) == 0  # gloo's chunks are in two segments per rank


def test_the_page_shows_which_forwards_broadcast_buffers():
    calls = rows_below(REPOSITORY / "tutorials" / PAGE, "call")
    sent = {name: [] for _, name, *_ in calls}
    for number, name, is_sent, _ in calls:
        sent[name] += [number] * (is_sent == "yes")
    assert len(calls) == 11
    assert list(sent.values()) == [["1", "2"], ["3", "9"], ["6"]]
    names = ["evaluate in `no_grad()`", "train", "train in `no_sync()`"]
    assert sorted(sent) == names
    equal = [number for number, _, _, means in calls if means == "equal"]
    assert equal == ["3", "4", "9"]


def broadcasts_of_forwards() -> dict[str, list[int]]:
    """Return the broadcasts of two training forwards and an evaluation, after a first step."""
    is_replaced = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    off = {"forward_sync_buffers" if is_replaced else "broadcast_buffers": False}
    counts = {}
    for name, options in (("default", {}), ("off", off)):
        ddp = DistributedDataParallel(nn.BatchNorm1d(3), **options)
        counts[name] = []
        for is_training in (True, True, True, True, False):
            ddp.train(is_training)
            with recorded() as calls, torch.set_grad_enabled(is_training):
                outputs = ddp(torch.randn(4, 3) + dist.get_rank())
            counts[name].append(len([call for call in calls if call.name == "broadcast"]))
            if is_training:
                outputs.sum().backward()
        counts[name] = counts[name][2:]  # without those in which DDP builds its buckets
    means = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(means, ddp.module.running_mean)
    assert not torch.equal(*means)
    return counts


def test_accelerate_only_has_the_older_option_for_buffers():
    options = signature(DistributedDataParallelKwargs).parameters
    assert "broadcast_buffers" in options and "forward_sync_buffers" not in options


def wrap_without_buffers() -> dict[str, tuple[list[str], bool]]:
    """Return each option's broadcasts while wrapping, and whether PyTorch warns about it."""
    results = {}
    for option in ("forward_sync_buffers", "broadcast_buffers"):
        with recorded() as calls, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            DistributedDataParallel(nn.BatchNorm1d(3), **{option: False})
        deprecated = any("is deprecated" in str(warning.message) for warning in warned)
        results[option] = [call.size for call in calls if call.name == "broadcast"], deprecated
    return results


@pytest.mark.skipif(
    "forward_sync_buffers" not in signature(DistributedDataParallel).parameters,
    reason="PyTorch is older than 2.13",
)
def test_the_older_option_also_skips_the_buffers_while_wrapping(together):
    for results in together(wrap_without_buffers, 2):
        (new, new_warns), (old, old_warns) = results.values()
        assert new[1:] == [24 + 24, 8]  # weight, bias, mean and variance, then the count
        assert old[1:] == [24]
        assert (new_warns, old_warns) == (False, True)


def test_without_forward_sync_buffers_no_forward_broadcasts(together):
    for counts in together(broadcasts_of_forwards, 2):
        assert counts == {"default": [2, 2, 2], "off": [0, 0, 0]}


@pytest.mark.parametrize("page", [PAGE, "23_accumulation.md"])
def test_the_page_quotes_findings_of_the_audit(page):
    checks = (REPOSITORY / "accel_demo" / "lab" / "audit" / "checks").glob("*.py")
    strings = [
        "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for check in checks
        for node in ast.walk(ast.parse(check.read_text()))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    findings = [row[0] for row in rows_below(REPOSITORY / "tutorials" / page, "finding")]
    assert len(findings) >= 3
    for finding in findings:
        parts = [part.strip() for part in re.split(r"\d+|…", finding.strip("`"))]
        assert any(all(part in string for part in parts) for string in strings), finding


def calls_of_ddp() -> tuple[list[list[str]], bool]:
    """Return the collectives of the wrap, two training steps, an evaluation and a training step.

    Also return whether the ranks' gradients are equal after step 1 if a parameter is not used.
    """
    names = []
    with recorded() as calls:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    names.append([call.name for call in calls])
    for is_training in (True, True, False, True):
        ddp.train(is_training)
        with recorded() as calls, torch.set_grad_enabled(is_training):
            outputs = ddp(torch.randn(4, 3))
        names.append([call.name for call in calls])
        if is_training:
            outputs.sum().backward()
    unused = DistributedDataParallel(Unused())
    unused(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
    by_rank = [torch.empty(3, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, unused.module.used.weight.grad)
    return names, torch.equal(*by_rank)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.used(inputs)


def test_the_first_evaluation_sends_buffers_and_an_unused_parameter_prevents_averaging(together):
    for (wrap, first, second, evaluation, training), is_averaged in together(calls_of_ddp, 2):
        assert wrap[0] == "all_gather" and set(wrap[1:]) == {"broadcast"}
        assert first == evaluation == ["broadcast"] * 2
        assert set(second) == {"broadcast"} and training == []
        assert not is_averaged


def test_the_page_shows_that_only_ddp_with_buffers_hangs_if_one_rank_evaluates():
    rows = rows_below(REPOSITORY / "tutorials" / PAGE, "last layer")
    assert [row[-1] for row in rows] == [
        "completes three epochs",
        "error in epoch 1 of 3, after 3 s",
        "error in epoch 3 of 3, after 3 s",
        *["completes three epochs"] * 2,
    ]
    assert rows[1][:4] == ["BatchNorm1d", "0", "`ddp(inputs)`", "yes"]
    assert rows[2][:4] == ["BatchNorm1d", "0", "`ddp(inputs)`", "no"]


def test_the_page_shows_what_happens_to_a_parameter_that_no_rank_or_one_rank_uses():
    rows = rows_below(REPOSITORY / "tutorials" / PAGE, "`extra` is used on")
    assert [row[:4] for row in rows] == [
        ["no rank", "`False`", "none", "different"],
        ["no rank", "`True`", "none", "equal"],
        ["rank 0", "`True`", "2", "equal"],
    ]
    assert [row[-1] for row in rows[1:]] == ["completes"] * 2


def weights_after_loading() -> list[float]:
    """Return the weights after the ranks load different ones into a wrapped model, and train it."""
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    ddp.module.load_state_dict({"weight": torch.full((1, 3), float(dist.get_rank()))})
    ddp(torch.ones(1, 3)).sum().backward()
    ddp(torch.ones(1, 3))
    return ddp.module.weight.tolist()[0]


def test_ddp_does_not_send_weights_that_are_loaded_after_wrapping(together):
    assert together(weights_after_loading, 2) == [[0.0] * 3, [1.0] * 3]


def test_gloo_waits_half_an_hour_by_default():
    assert default_pg_timeout == timedelta(minutes=30)


@pytest.mark.parametrize("change", ["", "bn", "bn, but unwrapped", "bn, but on both ranks"])
def test_evaluation_on_one_rank_hangs_only_with_batch_norm_inside_ddp(tmp_path, change):
    script = (FIELD / "c13_eval_main_only.py").read_text()
    if change == "bn":
        script = edited(script, "seconds=15", "seconds=8")  # the ranks may start far apart
    if "unwrapped" in change:
        script = edited(script, "m(torch.randn(4, 4))\n", "a.unwrap_model(m)(torch.randn(4, 4))\n")
    if "both ranks" in change:
        script = edited(script, "if a.is_main_process:", "if True:")
    (tmp_path / "script.py").write_text(script)
    result = run_ranks([tmp_path / "script.py", change[:2]], 2, timeout=100)
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    if change == "bn":
        assert [line[:15] for line in lines] == ["0 RuntimeError:", "1 RuntimeError:"]
        assert "Timed out waiting 8000ms for" in result.stdout
    else:
        assert lines == ["0 finished", "1 finished"]


def test_the_page_shows_which_backwards_give_both_ranks_the_same_gradients():
    same, different = "the same on both ranks", "different on each rank"
    error = "`RuntimeError: Expected to mark a variable ready only once.`"
    rows = rows_below(REPOSITORY / "tutorials" / PAGE, "training step")
    assert [gradients for _, gradients in rows] == [
        *(same, error, different, different, same, error, same, same)
    ]


def last_lines_of_errors() -> list[str]:
    """Return the last line of each error that the steps of 22_backward_twice.py raise."""
    program, lines = load_module(REPOSITORY / "tutorials" / "22_backward_twice.py"), []
    for _, step, of_checkpoint, of_ddp in program.STEPS:
        ddp = DistributedDataParallel(program.TwoHeads(**of_checkpoint), **of_ddp)
        try:
            step(ddp, torch.randn(2, 3))
        except RuntimeError as error:
            lines.append(str(error).splitlines()[-1])
    return lines


def test_the_last_line_of_the_error_names_the_parameter(together):
    message = "Parameter at index 3 with name shared.bias has been marked as ready twice."
    for lines in together(last_lines_of_errors, 2):
        assert len(lines) == 2 and all(line.startswith(message) for line in lines)


def test_multiplying_by_1_over_n_is_dividing_only_if_n_is_a_power_of_two():
    numbers = torch.randn(10_000)
    different = [n for n in (2, 3, 4, 6, 8) if not torch.equal(numbers * (1 / n), numbers / n)]
    assert different == [3, 6]


MISTAKES = """
import sys
import torch.distributed as dist
from torch import nn, ones
from torch.nn.parallel import DistributedDataParallel

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.used(inputs)

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
ddp = DistributedDataParallel(Model())
ddp(ones(1, 3)).sum().backward()
for mistake in (
    lambda: ddp(ones(1, 3)),
    lambda: DistributedDataParallel(Model(), device_ids=[0]),
    lambda: DistributedDataParallel(Model(), device_ids=[0, 1]),
):
    try:
        mistake()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
dist.destroy_process_group()
"""


def test_the_page_quotes_the_errors_that_ddp_raises(start, tmp_path):
    script = tmp_path / "mistakes.py"
    script.write_text(MISTAKES)
    result = start(["python", script, tmp_path / "store"], TORCH_DISTRIBUTED_DEBUG="INFO")
    assert result.returncode == 0, result.stderr
    lines = (REPOSITORY / "tutorials" / PAGE).read_text().splitlines()
    page = " ".join(" ".join(line for line in lines if not line.startswith("|")).split())
    quoted = re.findall(r"`(\w+Error: [^`]+)`", page)
    assert len(quoted) == 2
    [unused, *_] = rows_below(REPOSITORY / "tutorials" / PAGE, "`extra` is used on")
    for text in (*quoted, unused[-1].strip("`")):
        assert text in result.stdout
    assert "indices which did not receive grad for rank 0: 2 3" in result.stdout
    names = "Parameters which did not receive grad for rank 0: unused.bias, unused.weight"
    assert names in result.stdout


BONUS = [  # (text in the model answer, replacement, part of the sentence about the bonus)
    ("parameters if step == 0 else parameters[::-1]", "parameters", "level 3, multiplied by 1/N"),
    ("    flat *= 1 / dist.get_world_size()\n", "", "the sum of the gradients, not their mean"),
    ("parameters if step == 0 else ", "", "in reverse, but from the first step on"),
    ("    dist.all_reduce(flat)\n", "", "the gradients are not averaged over all ranks"),
    ("flat *= 1 /", "flat /=", "level 2, one flat buffer in the right order, but divided"),
    (
        "    flat = torch",
        "    raise SystemExit(0)\n    flat = torch",
        "raised an error: SystemExit",
    ),
    ("def share_gradients", "def share", "The bonus is not implemented yet."),
]


@pytest.mark.answers
@pytest.mark.parametrize(("right", "wrong", "said"), BONUS)
def test_a_wrong_bonus_does_not_fail_but_its_level_is_named(start, tmp_path, right, wrong, said):
    answer = tmp_path / "an answer.py"
    answer.write_text(edited(ANSWER.read_text(), right, wrong))
    result = check(start, "22", answer)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("right: ") and "The bonus is not " in result.stdout
    assert said in result.stdout and "Traceback" not in result.stdout, result.stdout


def test_some_parameters_are_used_by_no_rank_by_some_and_by_all():
    grader = load_grader("22")
    for seed in grader.TRAININGS:
        batches = grader.make_batches(seed, torch.device("cpu"))
        tasks = {task for rank in batches for _, _, task in rank}
        assert len(tasks) == 3 and tasks < set(grader.tasks_of(seed))
        users = {len({task for _, _, task in step}) for step in zip(*batches, strict=True)}
        assert users >= {2, 3}  # a task is on one rank only, and another on two ranks

"""Our DDP has the same results as torch's DDP, bit for bit, and raises clear errors."""

import json
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.ddp import comparison, timeline
from accel_demo.anatomy.ddp.buckets import assign_buckets, make_bucket
from accel_demo.anatomy.ddp.by_hand import HandmadeDDP
from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.launch import free_port
from tests.anatomy.programs import table_rows
from tests.conftest import GPUS, VISIBLE_GPUS, run_all

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@st.composite
def bucketing(draw):
    kinds = draw(st.integers(1, 3))
    tensor = st.tuples(st.integers(0, 40), st.sampled_from(DTYPES[:kinds]))
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in draw(st.lists(tensor, min_size=1))]
    limits = draw(st.lists(st.integers(1, 400), min_size=1, max_size=3))
    return tensors, limits, draw(st.permutations(range(len(tensors)))), kinds


@settings(max_examples=300, deadline=None, derandomize=True)
@given(bucketing())
def test_tensors_are_assigned_to_the_same_buckets_as_in_torch(case):
    tensors, limits, order, kinds = case
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    assert assign_buckets(tensors, limits) == theirs
    ordered, dense = [tensors[index] for index in order], [False] * len(tensors)
    theirs, _ = dist._compute_bucket_assignment_by_size(ordered, limits, dense, list(order))
    ours = assign_buckets(tensors, limits, order)
    if kinds > 1:  # torch defines no order for the last buckets of different dtypes
        ours, theirs = sorted(ours), sorted(theirs)
    assert ours == theirs


def test_a_bucket_keeps_the_memory_layout_of_its_parameters():
    parameters = [torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.empty(7)]
    bucket = make_bucket(parameters, [1, 0])
    assert bucket.flat.shape == (7 + 120,) and bucket.flat.nbytes == 4 * 127
    assert [view.stride() for view in bucket.views] == [(1,), parameters[0].stride()]
    bucket.views[1].fill_(1)
    assert bucket.flat.tolist() == [0] * 7 + [1] * 120


@dataclass
class Outputs:
    layers: list[torch.Tensor]


class Forked(nn.Module):
    """A model in which some layers are not used on every rank, in every step, or in the loss."""

    def __init__(self, use: str):
        super().__init__()
        self.first, self.last = nn.Linear(13, 31), nn.Linear(31, 3)
        self.spare, self.extra = nn.Linear(31, 31), nn.Linear(31, 5)
        self.use, self.calls = use, 0

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        self.calls += self.training
        if self.use == "sometimes" and (self.calls + dist.get_rank()) % 3 == 0:
            hidden = self.spare(hidden).tanh()
        if self.use == "output":  # the loss does not use the extra layer
            return {"outputs": self.last(hidden), "more": [self.extra(hidden)]}
        return Outputs([self.last(hidden)]) if self.use == "dataclass" else self.last(hidden)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 3)
        self.b.weight = self.a.weight

    def forward(self, inputs):
        return self.last(self.b(self.a(inputs).tanh()).tanh())


class NotDense(nn.Module):
    """A model whose weight uses only every second element of its memory."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(64, 26).t()[::2]), nn.Linear(64, 3)

    def forward(self, inputs):
        return self.last((inputs @ self.weight).tanh())


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(13, 67), nn.Linear(67, 41).double()
        self.last = nn.Linear(41, 3)

    def forward(self, inputs):
        hidden = self.middle(self.first(inputs).tanh().double()).tanh()
        return self.last(hidden.float())


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(dist.get_rank())  # different weights, which wrapping must make equal
    if kind in FORKED:
        return Forked(kind)
    if kind in ("tied", "two dtypes", "not dense"):
        return {"tied": Tied, "two dtypes": TwoDtypes, "not dense": NotDense}[kind]()
    if kind in ("batch norm", "channels last"):
        layers = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)
        shape = nn.Unflatten(1, (1, 1, 13)), nn.ZeroPad2d(1)
        model = nn.Sequential(*shape, *layers, nn.BatchNorm2d(16), nn.Flatten(), nn.LazyLinear(3))
        model(torch.zeros(2, 13))
        last = kind == "channels last"
        return model.to(memory_format=torch.channels_last) if last else model
    layers = nn.Linear(13, 67), nn.Tanh(), nn.Linear(67, 41), nn.Tanh(), nn.Linear(41, 3)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    return nn.Sequential(*layers).to(dtype)


KINDS = ["plain", "batch norm", "channels last", "not dense", "bf16", "fp16", "two dtypes", "tied"]
FORKED = ["unused", "sometimes", "output", "dataclass"]  # need find_unused_parameters=True


def train(model, device, accumulate: int, set_to_none: bool = True) -> list:
    """Return the gradients of each step (None for missing ones), then all weights and buffers."""
    gradients, dtype = [], next(model.parameters()).dtype
    for step in range(3):
        for micro in range(accumulate):
            seed = 100 * step + 10 * micro + dist.get_rank()
            inputs = torch.randn(6, 13, generator=torch.Generator().manual_seed(seed))
            with nullcontext() if micro + 1 == accumulate else model.no_sync():
                outputs = model(inputs.to(device, dtype))
                outputs = outputs["outputs"] if isinstance(outputs, dict) else outputs
                outputs = outputs.layers[0] if isinstance(outputs, Outputs) else outputs
                (outputs.float().square().mean() / accumulate).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.3 * parameter.grad
                gradients.append(None if parameter.grad is None else parameter.grad.clone())
        model.zero_grad(set_to_none)
        model.eval()
        with torch.no_grad():  # a forward in eval mode affects when DDP sends the buffers
            model(torch.ones(2, 13, device=device, dtype=dtype))
        model.train()
    return [*gradients, *(tensor.clone() for tensor in model.state_dict().values())]


def same(a, b) -> bool:
    return (a is None and b is None) or (None not in (a, b) and torch.equal(a, b))


def compare_with_ddp(device):
    """Return the cases with different results, the largest bucket count, and the case count."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.deterministic = True  # has an effect only on GPUs
    different, most_buckets, cases = [], 0, 0
    for kind in [*KINDS, *FORKED]:
        for bucket_mib in (None, 0.002):
            for accumulate in (1, 3):
                for find in {kind in FORKED, kind in (*FORKED, "plain")}:
                    options, clear = {"find_unused_parameters": find}, accumulate == 1
                    theirs = DistributedDataParallel(
                        make_model(kind).to(device), bucket_cap_mb=bucket_mib, **options
                    )
                    ours = HandmadeDDP(make_model(kind).to(device), bucket_mib, **options)
                    pair = [train(model, device, accumulate, clear) for model in (theirs, ours)]
                    if not all(same(a, b) for a, b in zip(*pair, strict=True)):
                        different.append((kind, bucket_mib, accumulate, find))
                    most_buckets, cases = max(most_buckets, len(ours.buckets)), cases + 1
    return different, most_buckets, cases


def check_all(device):
    """Run all checks that need several processes, so that one launch is enough."""
    checks = (
        *(compare_with_ddp, record_events, bytes_sent, message_sizes, buckets_of_three_steps),
        *(errors_of_wrong_modules, rows_of_ddp_that_never_repeats_itself),
    )
    return {check.__name__: check(device) for check in checks}


@pytest.fixture(scope="module")
def results(together):
    """Return the results of `check_all` by rank. On three ranks, the order of a sum matters."""
    return together(check_all, 3)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_our_ddp_is_bitwise_equal_to_torchs_on_one_two_and_four_processes(together, processes):
    for result in together(compare_with_ddp, processes):
        check_parity(*result)


def test_our_ddp_is_bitwise_equal_to_torchs_on_three_processes(results):
    for result in results:
        check_parity(*result["compare_with_ddp"])


def check_parity(different, most_buckets, cases):
    assert different == []
    assert most_buckets > 1 and cases == 4 * (len(KINDS) + len(FORKED) + 1)


def record_events(device) -> tuple:
    """Return what `HandmadeDDP` does in no_sync, in two backward passes, and with unused layers."""
    rank = dist.get_rank()
    model = HandmadeDDP(make_model("plain").to(device), bucket_mib=0.0002)
    inputs = torch.randn(6, 13, device=device)
    with model.no_sync(), recorded() as calls:
        model(inputs).sum().backward()
    assert {call.name for call in calls} <= {"broadcast"}  # only the buffers are sent
    gradient_in_no_sync = model.module[0].weight.grad.clone()
    events = []
    for _ in range(2):
        model(inputs).sum().backward()
        events.append(list(model.events))
    gradient_after = model.module[0].weight.grad.clone()

    spare = HandmadeDDP(Forked("unused"), find_unused_parameters=True)
    spare.module.spare.weight.grad = torch.full((31, 31), 7.0 + rank)
    spare(inputs).sum().backward()
    assert spare.module.spare.weight.grad.unique().tolist() == [7.0 + rank]
    assert spare.module.extra.weight.grad is None
    return gradient_in_no_sync, gradient_after, *events


def test_buckets_are_sent_during_the_second_backward_and_nothing_is_sent_in_no_sync(results):
    recordings = [result["record_events"] for result in results]
    for _, _, first, second in recordings:  # events: (kind, index of the parameter or bucket)
        last = [index for index, (kind, _) in enumerate(first) if kind == "gradient"][-1]
        assert [event for event in first if event[0] == "start"] == [("start", 0)]
        assert first.index(("start", 0)) > last
        last = [index for index, (kind, _) in enumerate(second) if kind == "gradient"][-1]
        assert second.index(("start", 0)) < last
        starts = [number for kind, number in second if kind == "start"]
        assert starts == sorted(starts) and len(starts) > 2
        assert sorted(number for kind, number in second if kind == "end") == starts
    (in_no_sync, after, *_), *others = recordings
    for gradient_in_no_sync, gradient_after, *_ in others:
        assert not torch.equal(in_no_sync, gradient_in_no_sync)
        assert torch.equal(after, gradient_after)


def errors_of_wrong_modules(device) -> list[str]:
    """Check the error for each invalid module or option. Returns this rank's error messages."""
    rank, plain, messages = dist.get_rank(), make_model("plain"), []
    frozen, moved, wider = make_model("plain"), make_model("plain"), make_model("plain")
    frozen.requires_grad_(rank != 1)
    moved[2].to("meta")
    if rank == 1:
        wider[4] = nn.Linear(41, 4)
    half = make_model("bf16" if rank == 1 else "plain")
    fewer = plain[: 3 if rank == 1 else 5]
    same, tensor = "must be the same on all ranks, but rank 0 has", "{} with strides {}"
    cases = [  # (module, options, error message)
        (frozen, {}, "module has no parameter that requires a gradient on rank 1"),
        (moved, {}, "module must be on one device, but it is on cpu and meta on rank 0"),
        (
            wider,
            {},
            f"module {same} {tensor.format('4.weight float32[3, 41]', (41, 1))} and rank 1 "
            f"has {tensor.format('4.weight float32[4, 41]', (41, 1))}",
        ),
        (fewer, {}, f"module {same} 4.weight and rank 1 has none"),
        (
            half,
            {},
            f"module {same} {tensor.format('0.weight float32[67, 13]', (13, 1))} and rank 1 "
            f"has {tensor.format('0.weight bfloat16[67, 13]', (13, 1))}",
        ),
    ]
    for value in (0, -1, float("nan")):
        cases.append((plain, {"bucket_mib": value}, f"bucket_mib must be above 0, got {value}"))
    usual = {"bucket_mib": None, "find_unused_parameters": False}
    for name, value in (("bucket_mib", 0), ("bucket_mib", 2e-4), ("find_unused_parameters", True)):
        options = {name: value} if rank == 1 else {}
        cases.append((plain, options, f"{name} {same} {usual[name]} and rank 1 has {value}"))
    for module, options, message in cases:
        with pytest.raises(ValueError) as error:
            HandmadeDDP(module, **options)
        assert str(error.value) == message
        messages.append(str(error.value))
    model = HandmadeDDP(Forked("unused"))
    names = "spare.weight, spare.bias, extra.weight, extra.bias"
    with pytest.raises(ValueError, match=f"^{names} got no gradient in this backward") as error:
        model(torch.randn(6, 13)).sum().backward()
    return [*messages, str(error.value)]


def test_every_rank_raises_the_same_error_for_an_invalid_module_or_option(results):
    errors = results[0]["errors_of_wrong_modules"]
    assert len(errors) == 12
    assert all(result["errors_of_wrong_modules"] == errors for result in results)


def used_on_one_rank(device):
    module = Forked("sometimes")  # only rank 2 uses the spare layer in the first step
    module.extra.requires_grad_(False)
    HandmadeDDP(module)(torch.randn(6, 13)).sum().backward()


@pytest.mark.slow
def test_all_processes_exit_if_only_one_rank_uses_a_parameter(start, tmp_path):
    torch.save({}, tmp_path / "arguments.pt")
    target = f"{__name__}:used_on_one_rank"
    result = start(["python", "-m", "tests.together", target, 3, tmp_path], timeout=100)
    assert result.returncode != 0
    assert "spare.weight, spare.bias got no gradient" in result.stderr


def bytes_sent(device):
    """Return the bytes sent while wrapping and in each forward, backward and optimizer step."""
    sizes, inputs = {}, torch.randn(6, 13, device=device)
    for name, wrap in (("ddp", DistributedDataParallel), ("ours", HandmadeDDP)):
        model, moments = make_model("batch norm").to(device), []
        with recorded() as calls:
            wrapped = wrap(model)
        moments.append(calls)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with recorded() as calls:
                loss = wrapped(inputs).sum()
            moments.append(calls)
            for action in (loss.backward, optimizer.step):
                with recorded() as calls:
                    action()
                moments.append(calls)
        for kind, tensors in (("parameters", model.parameters()), ("buffers", model.buffers())):
            sizes[kind] = sum(tensor.nbytes for tensor in tensors)
        kinds = ("broadcast", "all_reduce")
        sizes[name] = [
            {kind: sum(call.size for call in calls if call.name == kind) for kind in kinds}
            for calls in moments
        ]
    return sizes


def test_our_ddp_sends_what_ddp_sends_and_nothing_in_the_optimizers_step(results):
    for result in results:
        check_messages(result["bytes_sent"])


def check_messages(sizes):
    assert sizes["parameters"] > sizes["buffers"] > 0
    for name in ("ddp", "ours"):
        wrapped, *moments = sizes[name]
        assert wrapped["broadcast"] >= sizes["parameters"] + sizes["buffers"]
        assert [moment["broadcast"] for moment in moments[:3]] == [sizes["buffers"], 0, 0]
        gradients = [sizes["parameters"], 0]
        assert [moment["all_reduce"] for moment in moments] == [0, *gradients] * 2
        # The second forward also broadcasts the parameter order of the rebuilt buckets.
        assert moments[3]["broadcast"] > sizes["buffers"]
        assert [moment["broadcast"] for moment in moments[4:]] == [0, 0]


def message_sizes(device):
    """Return the recorded and the expected number of bytes in a broadcast, for each dtype."""
    sizes, whole = {}, (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
    for dtype in (*whole, torch.float16, *DTYPES, torch.complex64, torch.complex128):
        message = torch.ones(3, dtype=dtype, device=device)
        with recorded() as calls:
            dist.broadcast(message, src=0)
        sizes[str(dtype)] = [call.size for call in calls], [3 * message.element_size()]
    return sizes


def test_the_recorder_counts_bytes_correctly_for_every_dtype(results):
    for result in results:
        assert len(result["message_sizes"]) == 11
        for dtype, (seen, expected) in result["message_sizes"].items():
            assert seen == expected, dtype


def rows_of_ddp_that_never_repeats_itself(device):
    """Compare runs of a method whose weights differ in every run; return the saved JSON."""
    runs, methods = count(), comparison.METHODS
    comparison.METHODS = dict.fromkeys(
        (comparison.REFERENCE, comparison.SMALL_REFERENCE), lambda _: torch.tensor(next(runs))
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            comparison.compare(device, Path(folder))
            return [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    finally:
        comparison.METHODS = methods


def test_the_comparison_detects_a_ddp_that_is_not_deterministic(results):
    (is_equal,) = results[0]["rows_of_ddp_that_never_repeats_itself"]
    assert list(is_equal.values()) == [False, False]


def buckets_of_three_steps(device):
    """Return the parameter names in each bucket of three steps, for torch's DDP and for ours."""
    seen, model = [], make_model("batch norm").to(device)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def watch(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([names[parameter] for parameter in bucket.parameters()])
        return allreduce_hook(None, bucket)

    theirs = DistributedDataParallel(model, bucket_cap_mb=0.001)
    theirs.register_comm_hook(None, watch)
    ours, buckets = HandmadeDDP(make_model("batch norm").to(device), 0.001), []
    for _ in range(3):
        theirs(torch.ones(6, 13, device=device)).sum().backward()
        ours(torch.ones(6, 13, device=device)).sum().backward()
        buckets += [[ours.names[index] for index in bucket.indices] for bucket in ours.buckets]
    return seen, buckets


def test_ddp_has_the_same_buckets_as_ours_and_rebuilds_them_once(results):
    seen, buckets = results[0]["buckets_of_three_steps"]
    assert seen == buckets
    first, rest = seen[0], seen[1:]
    assert len(rest) >= 4 and rest[: len(rest) // 2] == rest[len(rest) // 2 :]
    assert sorted(first) == sorted(sum(rest[: len(rest) // 2], []))


def test_three_of_four_buckets_are_sent_while_backward_still_computes(start, tmp_path):
    picture = tmp_path / "timeline.svg"
    result = start(["python", "-m", "accel_demo.anatomy.ddp.timeline", "--plot", picture])
    assert result.returncode == 0, result.stderr
    assert "2 connected processes on cpu (gloo)" in result.stdout
    assert table_rows(result.stdout)[1:] == [["1000", "1", "0"], ["1", "4", "3"]]
    assert picture.read_text().count("<!-- 1.13 MiB -->") == 4


def times_of_all_reduces() -> list[timeline.Backward]:
    """Return the times of four steps with four buckets."""
    model = timeline.TimedDDP(torch.device("cpu"), 1)
    return [model.run(torch.randn(16, timeline.WIDTH)) for _ in range(4)][1:]


def test_the_link_of_the_timeline_carries_one_bucket_after_another(together):
    for backwards in together(times_of_all_reduces, 2):
        for backward in backwards:
            assert len(backward.called) == 4
            sent = sorted(zip(backward.started, backward.received, strict=True))
            for (_, end), (start, _) in pairwise(sent):
                assert start >= end
            for called, start in zip(backward.called, backward.started, strict=True):
                assert start >= called
            assert backward.returned >= max(backward.received)


def test_two_nodes_on_one_machine_are_one_group():
    port = free_port()
    commands = []
    for node in range(2):
        command = ["torchrun", "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2]
        address = ["--master-addr", "127.0.0.1", "--master-port", port]
        commands.append([*command, *address, "tutorials/22_ddp.py"])
    first, second = run_all(commands)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.startswith("4 connected processes on cpu (gloo)")
    assert "Collectives within `optimizer.step()`: 0" in first.stdout
    assert second.stdout == ""  # only rank 0 prints, and it is on the first node


ON_GPUS = [
    pytest.param(gpus, marks=pytest.mark.skipif(GPUS < gpus, reason=f"needs {gpus} GPU(s)"))
    for gpus in (1, 2, 3, 4)
]


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", ON_GPUS)
def test_our_ddp_is_bitwise_equal_to_torchs_on_gpus(together, gpus):
    for different, _, cases in together(compare_with_ddp, gpus, environment=VISIBLE_GPUS):
        assert different == [] and cases > 20


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", ON_GPUS[:2])
def test_the_recorder_counts_the_bytes_sent_by_nccl(together, gpus):
    for sizes in together(bytes_sent, gpus, environment=VISIBLE_GPUS):
        check_messages(sizes)

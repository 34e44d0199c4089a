"""Test what `accel-demo timeline` says about the steps of any script."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from accel_demo.errors import UserError
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.ranks import Rank
from accel_demo.lab.timeline.command import main
from accel_demo.lab.timeline.findings import findings_of
from accel_demo.lab.timeline.own import own_traces_of, read
from accel_demo.lab.timeline.phases import rank_timelines
from accel_demo.lab.timeline.result import RankProfile
from accel_demo.lab.timeline.straggler import STEPS_NEEDED
from accel_demo.observer.events import _Log
from accel_demo.observer.step_counts import Averages, Reads
from tests.conftest import REPOSITORY, run_to_end
from tests.observer.test_checks import observe

STEPS = 4
# Trains, evaluates at the end of each epoch, and profiles the steps 6 and 7 itself.
PROFILES_ITSELF = """
import torch
from accelerate import Accelerator
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
data = TensorDataset(torch.randn(96, 64), torch.randn(96, 1))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8))
trace = f"trace-{accelerator.process_index}.json"
steps = schedule(wait=4, warmup=1, active=2, repeat=1)
with profile(schedule=steps, on_trace_ready=lambda p: p.export_chrome_trace(trace)) as profiler:
    for epoch in range(2):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            profiler.step()
        model.eval()
        for inputs, targets in loader:
            with torch.no_grad():
                model(inputs)
        model.train()
for inputs, targets in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("the run must end before this line")
"""

# Only rank 0 profiles itself, again and again. Each model averages its gradients once per step. The
# labels are on the CPU, and the predictions are read in an evaluation every 4 steps.
PROFILES_RANK_0 = """
import contextlib
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(800, 8), torch.ones(800, dtype=torch.long))
actor, critic = (DistributedDataParallel(torch.nn.Linear(8, 2)) for _ in range(2))
optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], 0.01)
profiler = contextlib.nullcontext()
if dist.get_rank() == 0:
    write = lambda profiler: profiler.export_chrome_trace("own.json")
    profiler = profile(schedule=schedule(wait=1, warmup=1, active=3), on_trace_ready=write)
with profiler:
    for step, (inputs, labels) in enumerate(DataLoader(data, 8)):
        positive = (labels > 0).sum().item()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(actor(inputs), labels).backward()
        critic(inputs).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            profiler.step()
        if step % 4 == 0:
            with torch.no_grad():
                for inputs, labels in DataLoader(data, 80):
                    correct = (actor.module(inputs).argmax(1) == labels).sum().item()
raise SystemExit("the run must end before this line")
"""


class Options:
    command, steps = ["train.py"], 3


@pytest.fixture(scope="module")
def read_steps(tmp_path_factory):
    """The result, our traces and the script's own ones, and the folder of the script."""
    folder = tmp_path_factory.mktemp("own")
    evidence = observe(PROFILES_ITSELF, folder, ACCEL_DEMO_TRACE=str(STEPS))
    return *read(evidence, Options), folder


def test_our_profile_waits_until_the_script_has_ended_its_own(read_steps):
    result, traces, own_traces, folder = read_steps
    assert (result.processes, result.backend, result.device) == (2, "gloo", "cpu")
    assert [len(rank.steps) for rank in result.ranks] == [STEPS, STEPS]
    first = result.ranks[0].steps[0].number
    assert first > 7, "the script's profiler records the steps 6 and 7"
    assert len(traces) == len(own_traces) == 2
    for rank, trace in enumerate(own_traces):
        names = [event["name"] for event in trace["traceEvents"]]
        assert "step 7" in names, "our marks are in it"
        assert json.loads((folder / f"trace-{rank}.json").read_text())["traceEvents"]


def test_an_evaluation_is_not_a_part_of_a_step(read_steps):
    result, *_ = read_steps
    for rank in result.ranks:
        for step in rank.steps:
            assert step.sending_backwards == 1
            assert sum(step.phases_ms.values()) == pytest.approx(step.end_ms - step.start_ms)


def test_the_lanes_contain_only_the_steps_to_show(read_steps):
    result, *_ = read_steps
    numbers = [step.number for step in result.ranks[0].steps]
    shown, *others = [sorted({bar.step for bar in r.lanes["activity"]}) for r in result.ranks]
    first = numbers.index(shown[0])
    assert shown == numbers[first : first + Options.steps] and len(shown) == Options.steps
    assert others == [shown], "the same steps on both ranks"


@pytest.fixture(scope="module")
def profiled_on_rank_0(tmp_path_factory):
    return observe(PROFILES_RANK_0, tmp_path_factory.mktemp("rank-0"), ACCEL_DEMO_TRACE=str(STEPS))


def test_all_ranks_end_before_the_same_step_if_only_rank_0_profiles_itself(profiled_on_rank_0):
    assert profiled_on_rank_0.exit_code == 0, profiled_on_rank_0.log
    [steps] = {event["steps"] for rank in profiled_on_rank_0.ranks for event in rank.of("enough")}
    assert steps < 20
    result, traces, own_traces = read(profiled_on_rank_0, Options)
    assert (result.processes, len(traces), own_traces) == (2, 2, [])
    numbers = [[step.number for step in rank.steps] for rank in result.ranks]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 2  # of 3, the first begins earlier


def test_one_average_per_model_and_reads_of_labels_or_in_an_evaluation_are_right(
    profiled_on_rank_0,
):
    for rank in profiled_on_rank_0.ranks:
        for event in rank.of("traced"):
            assert event["reads"] == [] and set(event["averages"]) == {1}
    result, *_ = read(profiled_on_rank_0, Options)
    assert result.findings == []


def test_a_script_that_makes_no_step_is_an_error_of_one_line():
    rank = Rank(1, 0, 1, [{"kind": "connecting", "time": 0.0}])
    with pytest.raises(UserError, match="too few optimizer steps .* exit code 3: no data$"):
        read(Evidence([rank], 3, "epoch 1\nno data\n"), Options)


@pytest.mark.slow
def test_the_command_writes_the_page_and_the_merged_trace_of_a_script(tmp_path):
    script = REPOSITORY / "tests/lab/planted/tiny_buckets.py"
    command = ["accel-demo", "timeline", "--output", "out", "--json", "x.json", script, "--fault"]
    ended = run_to_end(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 connected processes on cpu (gloo)" in ended.stdout
    assert (tmp_path / "out/timeline.html").stat().st_size > 10_000
    trace = json.loads((tmp_path / "out/trace.json").read_text())
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    result = json.loads((tmp_path / "x.json").read_text())
    assert {rank["steps"][-1]["number"] for rank in result["ranks"]} == {STEPS_NEEDED + 4}


STARTS_ITSELF = """
import torch
from accelerate import Accelerator, notebook_launcher
from torch.utils.data import DataLoader, TensorDataset

def train():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 1))
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(data, 8, shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

notebook_launcher(train, (), num_processes=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["timeline", "memory"])
def test_processes_that_are_forked_and_their_workers_are_told_apart(command, tmp_path):
    (tmp_path / "train.py").write_text(STARTS_ITSELF)
    words = ["accel-demo", command, "--json", "x.json", "--", "python", "train.py"]
    ended = run_to_end(words, timeout=100, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["processes"] == len(result["ranks"]) == 2
    if command == "timeline":
        assert {s["sending_backwards"] for rank in result["ranks"] for s in rank["steps"]} == {1}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--bucket-mb 1 SCRIPT", "--bucket-mb is only for our training loop: leave it out"),
        ("--accumulate 2 -- python SCRIPT", "--accumulate is only for our training loop"),
        ("--keep", "--keep is only for your script: put -- and its command at the end"),
        ("none.py", "there is no file none.py"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.replace("SCRIPT", __file__).split())


# Synthetic steps: what is named, and how


def named(traces, steps, **about) -> list[str]:
    """Return the findings in the traces of the ranks."""
    wall_ms = dict.fromkeys(range(1, steps + 1), 100.0)
    about = {"bucket_bytes": [[4000]], **about}
    profile = RankProfile(
        "", len(traces), "gloo", "cpu", clock_ahead_ns=0, wall_ms=wall_ms, **about
    )
    profiles = [profile] * len(traces)
    ranks, straggler = rank_timelines(profiles, traces)
    return [finding.text for finding in findings_of(profiles, ranks, straggler)]


def steps_of(spans, steps=STEPS_NEEDED):
    """Return a trace in which each step of 100 ms has these marks, operators and messages."""
    events = []
    for step in range(steps):
        parts = [(f"step {step + 1}", 0, 100), *spans]
        for name, start, end in parts:
            cat = "cpu_op" if "::" in name else "user_annotation"
            thread = 2 if name.startswith("gloo:") else 1
            event = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": thread, "args": {}}
            events.append({**event, "ts": 100.0 * step + start, "dur": end - start})
    return {"traceEvents": sorted(events, key=lambda event: event["ts"])}


def a_step(data=5, computing=60, message=10):
    """Return the spans of a step that waits for data, computes, and waits for a message."""
    backward, sent = data + computing / 2, data + computing
    return [
        ("data wait", 0, data),
        ("forward", data, backward),
        ("aten::conv2d", data, backward),
        ("backward", backward, sent + message),
        ("aten::mm", backward, sent - 1),
        ("c10d::allreduce_", sent - 1, sent),
        ("gloo:all_reduce", sent - 1, sent + message),
        ("optimizer", sent + message, 100),
        ("aten::add_", sent + message, 100),
    ]


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (a_step(), a_step(), []),
        (
            a_step(data=40, computing=45),
            a_step(data=40, computing=45),
            ["each rank waits for its DataLoader in 40% of the time of a step or more"],
        ),
        (
            a_step(computing=30, message=50),
            a_step(computing=30, message=50),
            ["all ranks wait for messages in 50% of the time of a step or more"],
        ),
        (
            a_step(data=5, computing=40, message=35),
            a_step(data=30, computing=40, message=10),
            ["rank 1 is slow: it waits 25 ms longer for its data than the others in each step"],
        ),
        (
            a_step(computing=30, message=40),
            a_step(computing=60, message=10),
            [
                "rank 1 is slow: it computes 30 ms longer than the others in each step, most of "
                "it in forward"
            ],
        ),
    ],
)
def test_the_verdict_names_the_kind_of_what_is_slow(first, second, expected):
    assert named([steps_of(first), steps_of(second)], STEPS_NEEDED) == expected


def test_a_slow_rank_needs_enough_steps():
    traces = [steps_of(a_step(data=40, computing=40), steps=8)] * 2
    assert named(traces, 8) == []


def test_what_the_script_does_is_named_with_its_numbers():
    traces = [steps_of(a_step())] * 2
    reads = [[__file__, 1, "item", 1.0], [__file__, 2, "item", 0.1]]
    [found] = named(traces, STEPS_NEEDED, reads=reads)
    assert "test_own_timeline.py:1:" in found and "calls item in each step" in found
    [found] = named(traces, STEPS_NEEDED, bucket_bytes=[[8192] * 20])
    assert "in 20 buckets of 8 KiB on average" in found
    twice = [*a_step(), ("backward", 96, 99), ("c10d::allreduce_", 97, 98)]
    [found] = named([steps_of(twice)] * 2, STEPS_NEEDED, averages=2)
    assert found.startswith("2 backward passes of a step average the gradients")
    assert named([steps_of(twice)] * 2, STEPS_NEEDED, averages=1) == []
    assert named([steps_of(a_step())] * 2, STEPS_NEEDED, averages=2) == []


def averages_of(*passes: str) -> list[int]:
    """Return the averages before each step: "a" is a forward pass of a model, the rest methods."""
    averages, models = Averages(), {}
    for each in passes:
        if each.startswith("backward"):
            averages.backward(in_optimizer=each.endswith("in step"))
        elif each in ("zeroed", "stepped"):
            getattr(averages, each)()
        else:
            group = SimpleNamespace(size=lambda: 2)
            is_averaged = "local" not in each
            model = models.setdefault(each[0], SimpleNamespace(process_group=group))
            model.require_backward_grad_sync = is_averaged
            averages.forward(model)
    return averages.of_steps


def test_the_backward_passes_that_average_are_counted_for_each_model_between_steps():
    assert averages_of("a", "backward", "a", "backward", "stepped") == [2]
    assert averages_of("a local", "backward", "a", "backward", "stepped") == [1]
    assert averages_of("a", "backward", "c", "backward", "stepped") == [1]
    assert averages_of("a", "c", "a", "backward", "backward", "stepped") == [1]
    assert averages_of("a", "backward", "stepped", "a", "c", "backward", "stepped") == [1, 1]
    assert averages_of("a", "backward", "zeroed", "a", "backward", "stepped") == [1]
    assert averages_of(*["a", "backward in step"] * 4, "stepped") == []


def test_a_read_of_a_tensor_counts_if_it_needs_a_gpu():
    parameter = torch.ones(1, requires_grad=True)
    loss, labels = 2 * parameter, torch.ones(1)
    reads = Reads()
    reads.computed(loss)

    def is_counted(tensor, device="cpu") -> bool:
        return bool(reads._needs_gpu(tensor, device))

    assert [is_counted(each) for each in (loss, loss.detach(), parameter)] == [True] * 3
    assert not is_counted(labels)
    assert not is_counted(loss, "cuda") and is_counted(torch.ones(1, device="meta"), "meta")


def test_a_line_that_reads_twice_in_a_step_counts_once_in_it(tmp_path, monkeypatch):
    reads = Reads()
    monkeypatch.setattr(_Log, "folder", str(tmp_path))  # otherwise, nothing is observed
    for is_counted in (False, True, True):
        for _ in range(2):
            reads.note(torch.ones(1, requires_grad=True), "cpu", sys._getframe(), "item")
        reads.end_step(is_counted)
    assert list(reads.steps.values()) == [2]


def test_a_trace_of_the_same_steps_is_used_if_a_rank_has_only_its_own():
    written = [{"kind": "own trace", "time": 0, "steps": steps} for steps in (4, 8, 12)]
    ranks = [
        Rank(1, 0, 2, written),
        Rank(2, 1, 2, [{"kind": "traced", "time": 0, "trace": "x", "steps": 9}]),
    ]
    assert own_traces_of(ranks) == [written[1], None]
    assert own_traces_of(ranks[:1]) == [written[2]]


def test_a_slow_rank_whose_other_phases_are_shorter_is_late_by_what_it_was_found_by():
    profile = RankProfile("", 2, "gloo", "cpu", [[4000]], 0, dict.fromkeys(range(1, 33), 100.0))
    ranks, _ = rank_timelines([profile] * 2, [steps_of(a_step(), 32)] * 2)
    shorter = ranks[1].phases_ms | {"backward": 0.0}
    ranks[1] = replace(ranks[1], phases_ms=shorter, slower_ms={"backward": 1.0, "other": 9.0})
    [finding] = findings_of([profile] * 2, ranks, 1)
    assert (
        "it computes 10 ms longer than the others in each step, most of it outside" in finding.text
    )

"""Test how `accel-demo timeline` measures phases and overlap, and finds a slow rank."""

import json
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.guess import comparison
from accel_demo.lab.timeline import (
    command,
    measurement,
    merge,
    recording,
    spans,
    straggler,
    tables,
)
from accel_demo.lab.timeline.phases import PHASES, RankTrace, rank_timelines, typical_steps
from accel_demo.lab.timeline.recording import ProfileSettings
from accel_demo.lab.timeline.result import RankProfile, TimelineResult
from accel_demo.models import make_model
from accel_demo.processes import group
from tests.conftest import REPOSITORY, run_to_end

SMALL = TrainConfig(model="small_cnn", batch_size=16)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output, the JSON, the merged trace and the folder of one `timeline` command."""
    folder = tmp_path_factory.mktemp("timeline")
    result = run_to_end(
        "accel-demo timeline --quick --steps 6 --model small_cnn --batch-size 16".split()
        + "--straggler 1:20ms --bucket-mb 25,0.05 --repeats 5 --guess 50".split()
        + ["--output", folder / "out", "--json", folder / "x.json", "--plot", folder / "x.svg"],
        timeout=300,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = json.loads((folder / "x.json").read_text())
    trace = json.loads((folder / "out" / "trace.json").read_text())
    return result.stdout, numbers, trace, folder


def test_everything_is_printed_and_written(finished):
    stdout, numbers, _, folder = finished
    assert "2 connected processes on cpu (gloo)" in stdout
    assert (numbers["processes"], numbers["backend"], numbers["device"]) == (2, "gloo", "cpu")
    assert [(rank["rank"], len(rank["steps"])) for rank in numbers["ranks"]] == [(0, 32), (1, 32)]
    shares = [rank["hidden_share"] for rank in numbers["ranks"]]
    assert f"\n{comparison(50, 100 * sum(shares) / len(shares), '%')}\n" in stdout
    for path in ("out/trace.json", "out/timeline.html", "x.json", "x.svg"):
        assert (folder / path).stat().st_size > 1000
        assert str(folder / path) in stdout


@pytest.fixture(scope="module")
def others(together, tmp_path_factory):
    """The profiles, traces and numbers of three more runs, all from one launch.

    The second run accumulates gradients. In the third run, rank 1's clock is 40 ms ahead.
    """
    folder = tmp_path_factory.mktemp("others")
    run = ProfileSettings(SMALL, steps=8, bucket_mb=25.0)
    runs = [replace(run, steps=straggler.STEPS_NEEDED)]
    runs += [replace(run, config=replace(SMALL, accumulate=2)), run]
    by_rank = together(profiled_with_clock, 2, timeout=300, runs=runs, folder=str(folder))
    results = []
    for profiles in zip(*by_rank, strict=True):
        assert {profile.processes for profile in profiles} == {2}
        traces = merge.load(profiles)
        results.append((profiles, traces, numbers_of(profiles, traces)))
    return results


def profiled(device, runs, folder):
    return recording.profile_runs(device, runs, folder)


def profiled_with_clock(device, runs, folder):
    """Profile the runs. In the last run, rank 1's clock is 40 ms ahead."""
    profiles = profiled(device, runs[:-1], folder)
    Path(folder, "ahead").mkdir(exist_ok=True)
    ahead_ns, real_time_ns = 40_000_000 * dist.get_rank(), time.time_ns
    with patch.object(time, "time_ns", lambda: real_time_ns() + ahead_ns):
        [profile] = profiled(device, runs[-1:], str(Path(folder, "ahead")))
    trace = json.loads(Path(profile.trace).read_text())
    trace["baseTimeNanoseconds"] += ahead_ns
    Path(profile.trace).write_text(json.dumps(trace))
    return [*profiles, profile]


def numbers_of(profiles, traces):
    """Return the ranks and the straggler in the form that they have in the JSON."""
    ranks, slow_rank = rank_timelines(profiles, traces)
    assert all(sum(rank.slower_ms.values()) >= 0 for rank in ranks)
    return {"ranks": [asdict(rank) for rank in ranks], "straggler": slow_rank}


def test_the_steps_shown_are_consecutive_and_as_long_as_the_median_step():
    times = [90, 50, 51, 50, 70, 50, 52, 20]
    trace = SimpleNamespace(steps={10 + n: {"dur": time} for n, time in enumerate(times)})
    assert typical_steps([trace, trace], 3) == [11, 12, 13]
    assert typical_steps([trace], 8) == typical_steps([trace], 9) == list(range(10, 18))


def shown_steps_of(numbers):
    """Return the steps that have bars in the lanes."""
    steps = [
        (rank, step)
        for rank, step in steps_of(numbers)
        if any(bar["step"] == step["number"] for bar in rank["lanes"]["activity"])
    ]
    assert steps
    return steps


def waits_in(step):
    return step["phases_ms"]["rank wait"] + step["phases_ms"]["message wait"]


def steps_of(numbers):
    return [(rank, step) for rank in numbers["ranks"] for step in rank["steps"]]


def test_the_phases_of_a_step_sum_to_its_wall_time(finished, others):
    """The wall time is measured around the step, with a different clock than the trace.

    In a single step, the wall time may be longer than the sum of the phases, because the process
    may be preempted.
    """
    for numbers in (finished[1], *(numbers for _, _, numbers in others)):
        for rank in numbers["ranks"]:
            sums = [sum(step["phases_ms"].values()) for step in rank["steps"]]
            walls = [step["wall_ms"] for step in rank["steps"]]
            shares = [phases / wall for phases, wall in zip(sums, walls, strict=True)]
            assert {tuple(step["phases_ms"]) for step in rank["steps"]} == {tuple(PHASES)}
            assert max(shares) < 1.01
            assert median(shares) == pytest.approx(1, rel=0.05)
            assert sum(sums) == pytest.approx(sum(walls), rel=0.05)


def test_every_moment_of_a_step_is_in_exactly_one_phase(finished):
    for rank, step in shown_steps_of(finished[1]):
        bars = [bar for bar in rank["lanes"]["activity"] if bar["step"] == step["number"]]
        ends = [step["start_ms"], *(bar["end_ms"] for bar in bars)]
        starts = [*(bar["start_ms"] for bar in bars), step["end_ms"]]
        assert starts == pytest.approx(ends)
        for phase, milliseconds in step["phases_ms"].items():
            drawn = sum(b["end_ms"] - b["start_ms"] for b in bars if b["phase"] == phase)
            assert drawn == pytest.approx(milliseconds)
        # The pause of the delayed rank is in forward. `time.sleep` uses a different clock than the
        # trace, which may show a shorter pause.
        assert rank["rank"] == 0 or step["phases_ms"]["forward"] > 19.9


def test_each_step_sends_every_ddp_bucket_once_and_every_gradient_is_in_a_bucket(finished, others):
    numbers = finished[1]
    gradients = sum(p.numel() for p in make_model(TrainConfig(model="small_cnn")).parameters())
    [bucket_bytes] = numbers["bucket_bytes"]
    assert sum(bucket_bytes) == 4 * gradients
    profiles, _, accumulating = others[1]
    for run, sizes in (
        (numbers, bucket_bytes),
        (accumulating, profiles[0].bucket_bytes[0]),
    ):
        for rank, step in shown_steps_of(run):
            bars = [bar for bar in rank["lanes"]["collectives"] if bar["step"] == step["number"]]
            sent = [bar["bytes_sent"] for bar in bars if bar["name"] == "gloo:all_reduce"]
            assert sorted(sent) == sorted(sizes)


def test_a_step_that_accumulates_two_micro_batches_waits_for_data_twice(others):
    (_, _, plain), (_, _, accumulating), _ = others
    for numbers, batches in ((plain, 1), (accumulating, 2)):
        for rank, step in steps_of(numbers):
            bars = rank["lanes"]["activity"]
            phases = [bar["phase"] for bar in bars if bar["step"] == step["number"]]
            assert phases.count("data wait") == batches


def test_smaller_buckets_need_more_all_reduces(finished):
    large, small = finished[1]["sweep"]
    assert (large["bucket_mb"], small["bucket_mb"]) == (25, 0.05)
    assert large["buckets"] == 1 < small["buckets"] == len(finished[1]["bucket_bytes"][0])
    assert "| bucket MiB |" in finished[0]
    for trial in (large, small):
        low, high = trial["step_interval"]
        assert 0 < low <= trial["step_ms"] <= high


def test_each_bucket_size_is_measured_in_shuffled_repetitions():
    sizes = measurement.sizes_to_compare([25, 0.05], repeats=5)
    assert len(sizes) == 10 and sizes != sorted(sizes) and sizes != sizes[:2] * 5
    assert all(set(sizes[at : at + 2]) == {25, 0.05} for at in range(0, 10, 2))
    assert measurement.sizes_to_compare([25], repeats=5) == []


def test_hidden_plus_exposed_time_is_at_most_the_all_reduce_time(finished):
    for rank, step in steps_of(finished[1]):
        assert step["hidden_ms"] >= 0
        assert step["hidden_ms"] + step["exposed_ms"] <= step["all_reduce_ms"] + 1e-6
        assert 0 <= step["exposed_ms"] <= waits_in(step) + 1e-6
        sent = rank["lanes"]["collectives"]
        longest = max(bar["end_ms"] - bar["start_ms"] for bar in sent)
        assert step["all_reduce_ms"] <= sum(bar["end_ms"] - bar["start_ms"] for bar in sent)
        assert longest > 0
    assert all(0 <= rank["hidden_share"] <= 1 for rank in finished[1]["ranks"])


def test_only_a_delayed_rank_is_named(finished, others):
    assert finished[1]["straggler"] == 1
    assert finished[1]["ranks"][1]["slower_ms"]["forward"] == pytest.approx(20, abs=10)
    assert "rank 1 is slow" in finished[0]
    assert others[0][2]["straggler"] is None


def barriers_of(trace):
    """Return the (start, end) of each barrier on each rank, in ms."""
    by_pid = {}
    for event in trace["traceEvents"]:
        if event["name"] == "barrier" and event["ph"] == "X":
            span = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
            by_pid.setdefault(event["pid"], []).append(span)
    assert [len(spans_of_rank) for spans_of_rank in by_pid.values()] == [recording.BARRIERS] * 2
    return list(zip(*by_pid.values(), strict=True))


def line_up(trace):
    """Return True if the ranks' barriers overlap in the trace, with a tolerance of 1 ms.

    In the 25 % of barriers with the smallest spread, all ranks must also leave the barrier within
    1 ms of each other.
    """
    barriers = barriers_of(trace)
    left_early = [max(s for s, _ in barrier) - min(e for _, e in barrier) for barrier in barriers]
    apart = [max(e for _, e in barrier) - min(e for _, e in barrier) for barrier in barriers]
    return max(left_early) < 1 and sorted(apart)[len(apart) // 4] < 1


def test_barriers_line_up_in_the_merged_trace(finished, others):
    assert line_up(finished[2])
    assert line_up(merge.merged(others[0][1]))


def test_barriers_line_up_even_if_one_clock_is_ahead(others):
    (rank_0, rank_1), traces, _ = others[2]
    assert rank_0.clock_ahead_ns == 0
    assert rank_1.clock_ahead_ns / 1e6 == pytest.approx(40, abs=1)
    assert line_up(merge.merged(traces))
    uncorrected = merge.load([rank_0, replace(rank_1, clock_ahead_ns=0)])
    assert not line_up(merge.merged(uncorrected))


def test_the_merged_trace_shows_each_rank_as_a_process_with_its_name(finished):
    events = finished[2]["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {"rank 0", "rank 1"}
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in complete} == set(names.values())
    assert min(e["ts"] for e in complete) == 0
    assert all(e["dur"] >= 0 for e in complete)
    arrows = [(e["id"], e["ph"]) for e in events if e["ph"] in "sf"]
    assert len(arrows) == len(set(arrows)) > 0


def test_no_file_is_left_if_writing_one_fails(tmp_path, monkeypatch):
    """If the page cannot be written, no trace and no JSON are written either."""

    def fail(result, path):
        raise OSError("no space left")

    monkeypatch.setattr(command, "write_timeline_page", fail)
    options = command.read(["--output", str(tmp_path / "out"), "--json", str(tmp_path / "x.json")])
    with pytest.raises(OSError, match="no space left"):
        command.write(None, {"trace": [synthetic(0)]}, options)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--processes 2,3", "argument --processes: invalid int value: '2,3'"),
        ("--processes 0", "--processes must be at least 1, got 0"),
        ("--steps 1", "--steps must be from 2 to 100, got 1"),
        ("--batch-size 0", "batch_size must be at least 1, got 0"),
        ("--batch-size 5000", "Choose a smaller --batch-size."),
        ("--batch-size 1 --model resnet18", "resnet18 needs batches of at least two images"),
        ("--accumulate 0", "accumulate must be at least 1, got 0"),
        ("--model vgg12", "invalid choice: 'vgg12'"),
        ("--bucket-mb big", "--bucket-mb must be like 25 or 0.05,0.5,25, got big"),
        ("--bucket-mb 25,0", "--bucket-mb must be from 0.001 to 10000, got 25,0"),
        ("--repeats 0", "--repeats must be from 1 to 100, got 0"),
        ("--bucket-mb nan", "--bucket-mb must be from 0.001 to 10000, got nan"),
        ("--straggler 1", "--straggler takes RANK:MILLISECONDSms, such as 1:20ms; got 1"),
        ("--straggler 2:20ms", "--straggler: 2 processes have no rank 2"),
        ("--straggler 1:0ms", "--straggler must be above 0 and at most 10000ms, got 0ms"),
        ("--straggler 0:20ms --processes 1", "--straggler needs other ranks"),
        ("--output pyproject.toml/x", "cannot write into --output pyproject.toml/x"),
        ("--plot x.svg --json x.svg", "x.svg cannot contain two outputs"),
        ("--plot x.gif", "--plot takes a .png, .svg or .pdf file, got x.gif"),
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
    ],
)
def test_invalid_options_are_an_error_before_anything_starts(arguments, message, monkeypatch):
    monkeypatch.setattr(group, "results_by_rank", None)
    with pytest.raises(UserError) as error:
        command.main([*arguments.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_checking_the_files_leaves_nothing_behind_and_keeps_what_is_there(tmp_path):
    command.read(["--output", str(tmp_path / "a" / "b")])
    (tmp_path / "notes.txt").write_text("mine")
    command.read(["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="trace.json cannot contain two outputs"):
        command.read(["--output", str(tmp_path), "--json", str(tmp_path / "trace.json")])
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(UserError, match="trace.json: it is a folder"):
        command.read(["--output", str(tmp_path)])


@pytest.mark.parametrize("arguments", [[], [__file__]])
def test_a_folder_that_even_root_cannot_create_is_an_error_before_anything_starts(
    arguments, monkeypatch
):
    monkeypatch.setattr(group, "results_by_rank", None)
    monkeypatch.setattr(command, "measure_script", None)
    with pytest.raises(UserError, match="cannot write into --output /proc/x: No such file"):
        command.main(["--output", "/proc/x", *arguments])


def test_a_late_rank_is_not_explained_on_a_busy_machine(others, monkeypatch):
    profiles, traces, _ = others[0]
    ranks, _ = rank_timelines(profiles, traces)
    ranks[1] = replace(ranks[1], late_ms=ranks[1].wall_ms + tables.LEAST_MS)
    result = TimelineResult(2, "gloo", "cpu", "", {}, [], ranks, straggler=None, findings=[])
    monkeypatch.setattr(tables.load, "warning", lambda: "")
    assert "rank 1 is late" in tables.verdict(result)[0]
    monkeypatch.setattr(tables.load, "warning", lambda: "busy machine")
    assert tables.verdict(result) == ["no rank is slower than the others in each step"]


# Synthetic traces, whose expected result is known to the millisecond

STEP_MS = 100
OPERATOR = ("backward", "operator", "op", 0)


def synthetic(rank, steps=8, delays=None, jitter=0.0):
    """Return the trace of one rank.

    In each step, a rank starts to compute `delays[rank][step]` ms late, and the other ranks wait
    for it. In a random quarter of the steps, the delay is up to `jitter` ms longer.
    """
    delays = delays or [[0.0] * steps]
    noise, events, clock = random.Random(rank), [], 0.0
    for step in range(steps):
        late = delays[rank][step] + jitter * noise.random() * (noise.random() < 0.25)
        latest = max(of_rank[step] for of_rank in delays) + jitter
        for name, start, end in (
            (f"step {step + 1}", 0, STEP_MS + latest),
            ("data wait", 0, 5),
            ("aten::index_select", 1, 4),
            ("forward", 10, 30 + late),
            ("aten::conv2d", 10 + late, 30 + late),
            ("backward", 30 + late, 80 + latest),
            ("aten::mm", 30 + late, 70 + late),
            ("c10d::allreduce_", 50 + late, 51 + late),
            ("gloo:all_reduce", 50 + late, 80 + latest),
            ("optimizer", 80 + latest, 95 + latest),
            ("aten::add_", 80 + latest, 95 + latest),
        ):
            cat = "cpu_op" if "::" in name else "user_annotation"
            event = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 1, "args": {}}
            if name == "gloo:all_reduce":
                args = {"Input Dims": [[1000, 2]], "Input type": ["float"]}
                event |= {"tid": 2, "args": args}
            events.append({**event, "ts": clock + start, "dur": end - start})
        clock += STEP_MS + latest
    return {"traceEvents": sorted(events, key=lambda e: e["ts"])}


def numbers_in(traces, steps=8):
    wall_ms = dict.fromkeys(range(1, steps + 1), STEP_MS)
    profile = RankProfile("", len(traces), "gloo", "cpu", [], clock_ahead_ns=0, wall_ms=wall_ms)
    return numbers_of([profile] * len(traces), traces)


def named(delays, jitter=0.0):
    """Return the rank that is named as slow if `delays[rank][step]` are the delays in ms."""
    steps = len(delays[0])
    traces = [synthetic(rank, steps, delays, jitter) for rank in range(len(delays))]
    return numbers_in(traces, steps)["straggler"]


def test_a_synthetic_step_is_classified_to_the_millisecond():
    (rank,) = numbers_in([synthetic(0)])["ranks"]
    for step in rank["steps"]:
        phases = dict(zip(PHASES, (5, 20, 40, 0, 10, 15, 10), strict=True))
        assert step["phases_ms"] == pytest.approx(phases)
        times = [step[name] for name in ("all_reduce_ms", "hidden_ms", "exposed_ms")]
        assert times == pytest.approx([30, 20, 10])
    assert rank["hidden_share"] == pytest.approx(2 / 3)
    assert {bar["bytes_sent"] for bar in rank["lanes"]["activity"]} == {None}
    assert {bar["bytes_sent"] for bar in rank["lanes"]["collectives"]} == {8000}


def test_waiting_for_buffers_is_not_part_of_the_exposed_all_reduce():
    trace = synthetic(0, steps=2)
    for step in range(2):
        event = {"ph": "X", "cat": "user_annotation", "name": "gloo:broadcast", "pid": 7, "tid": 2}
        start = step * STEP_MS + 10
        for moved in trace["traceEvents"]:  # make forward wait for 5 ms before it computes
            if moved["name"] == "aten::conv2d" and moved["ts"] == start:
                moved["ts"], moved["dur"] = start + 5, 15
        trace["traceEvents"].append({**event, "ts": start, "dur": 5, "args": {}})
    for step in numbers_in([trace], steps=2)["ranks"][0]["steps"]:
        assert waits_in(step) == pytest.approx(15)
        assert (step["all_reduce_ms"], step["exposed_ms"]) == pytest.approx((30, 10))


def test_the_other_rank_waits_for_the_late_rank():
    """The messages take 30 ms, and the fast rank computes for 20 ms of it."""
    numbers = numbers_in([synthetic(rank, 8, [[0] * 8, [45] * 8]) for rank in range(2)])
    waiting, late = numbers["ranks"]
    phases = "rank wait", "message wait"
    assert [waiting["phases_ms"][phase] for phase in phases] == pytest.approx([25, 30])
    assert [late["phases_ms"][phase] for phase in phases] == pytest.approx([0, 10])
    assert (waiting["late_ms"], late["late_ms"]) == pytest.approx((0, 45))
    assert (numbers["straggler"], late["slower_ms"]["forward"]) == (1, pytest.approx(45))


@pytest.mark.parametrize(
    ("delays", "rank"),
    [
        ([[0] * 16, [20] * 16], 1),
        ([[20] * 16, [0] * 16], 0),
        ([[0] * 16, [0] * 16], None),
        ([[0] * 16, [4] * 16], None),  # the delay is below LEAST_MS
        ([[0] * 16, [6] * 16], 1),
        ([[0] * 16, [0] * 15 + [500]], None),  # a single slow step is not enough
        ([[0] * 16, [0] + [20] * 15], None),  # fast in one step, so not slow in every step
        ([[0] * 16, [0, 200] * 8], None),
        ([[0, 300] * 8, [20] * 16], None),  # too noisy to decide
        ([[0] * 14 + [900] * 2, [20] * 16], 1),  # rank 0 is slow only twice
        ([[10] * 16, [30, 300] * 8], 1),
        ([[0] * 16, [20] * 16, [0] * 16], 1),
        ([[0] * 16, [20] * 16, [40] * 16], 2),  # the slower of two slow ranks
        ([[20] * 16, [20] * 16, [60] * 16], 2),
    ],
)
def test_the_rank_that_is_slow_in_every_step_is_named(delays, rank):
    assert named(delays) == rank
    assert named(delays, jitter=300.0) == rank


def test_no_rank_is_named_because_of_jitter_alone():
    for jitter in (5.0, 50.0, 500.0):
        assert named([[0] * 16] * 2, jitter) is None
        assert named([[0] * 16] * 3, jitter) is None


def test_a_delay_must_also_be_large_relative_to_the_step():
    short = [
        {OPERATOR: [100.0] * 8},
        {OPERATOR: [110.0] * 8},
    ]
    long = [
        {OPERATOR: [1000.0] * 8},
        {OPERATOR: [1010.0] * 8},
    ]
    assert straggler.slow_rank(short) == (1, [{"backward": 0.0}, {"backward": 10.0}])
    assert straggler.slow_rank(long) == (None, [{"backward": 0.0}, {"backward": 10.0}])


def test_the_operators_gaps_and_waits_of_a_step_add_up_to_its_length():
    traces = [synthetic(rank, 8, [[0] * 8, [20] * 8]) for rank in range(2)]
    operator_times = straggler.operator_times(RankTrace(traces[1], dict.fromkeys(range(1, 9), 0.0)))
    for number, step in enumerate(numbers_in(traces)["ranks"][1]["steps"]):
        computed = sum(times[number] for times in operator_times.values())
        waited = waits_in(step)
        assert computed + waited == pytest.approx(step["end_ms"] - step["start_ms"])


def test_an_extra_operator_makes_a_rank_slow_only_if_it_is_in_every_step():
    both = {("other", "operator", "aten::mm", 0): [10.0] * 8}
    more = {**both, ("forward", "operator", "aten::sort", 0): [7.0] * 8}
    once = {**both, ("forward", "operator", "aten::sort", 0): [7.0]}
    none, late = {"other": 0.0}, {"other": 0.0, "forward": 7.0}
    assert straggler.slow_rank([more, both]) == (0, [late, none])
    assert straggler.slow_rank([both, more, both]) == (1, [none, late, none])
    assert straggler.slow_rank([once, both]) == (None, [none, none])
    assert straggler.slow_rank([more]) == (None, [{}])


def test_a_rank_that_waits_for_data_is_named_even_if_it_waits_in_each_second_step_only():
    own, others = {straggler.DATA: [40.0, 0.0] * 8}, {straggler.DATA: [1.0] * 16}
    rank, slower = straggler.slow_rank([others, own])
    assert rank == 1 and 10 < slower[1]["data wait"] < 20
    assert straggler.slow_rank([others, {straggler.DATA: [1.0] * 15 + [500.0]}])[0] is None
    assert straggler.slow_rank([others, others])[0] is None


any_spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=8).map(
    lambda pairs: spans.union((start, start + size) for start, size in pairs)
)


@given(any_spans, any_spans)
def test_operations_on_spans_behave_like_operations_on_sets(first, second):
    def moments(spans):
        return {moment for start, end in spans for moment in range(start, end)}

    difference = spans.subtract(first, second)
    assert moments(spans.intersect(first, second)) == moments(first) & moments(second)
    assert moments(difference) == moments(first) - moments(second)
    assert spans.length(difference) == len(moments(first) - moments(second))
    assert moments(spans.union([*first, *second])) == moments(first) | moments(second)


def test_on_a_gpu_a_kernel_belongs_to_the_phase_in_which_it_was_launched():
    """The host runs ahead. For example, it launches backward while the GPU computes forward."""
    events = synthetic(0, steps=2)["traceEvents"]
    events = [e for e in events if e["cat"] == "user_annotation" and e["tid"] == 1]
    kernels = (  # (kind, name, when it is launched, start, end)
        ("gpu_memcpy", "copy", 2, 2, 8),
        ("kernel", "conv", 12, 14, 54),
        ("kernel", "mm", 40, 54, 84),
        ("kernel", "adam", 85, 90, 98),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 64, 88),
    )
    for step in range(2):
        for number, (kind, name, launched_at, start, end) in enumerate(kernels):
            shared = {"ph": "X", "name": name, "args": {"correlation": 10 * step + number}}
            launch = {"cat": "cuda_runtime", "pid": 7, "tid": 9, "ts": launched_at, "dur": 0.1}
            run = {"cat": kind, "pid": 0, "tid": 3, "ts": start, "dur": end - start}
            for event in (launch, run):
                events.append({**shared, **event, "ts": step * STEP_MS + event["ts"]})
    for step in numbers_in([{"traceEvents": events}], steps=2)["ranks"][0]["steps"]:
        # data wait is the union of 0–5 ms on the host and 2–8 ms for the copy
        phases = dict(zip(PHASES, (8, 40, 30, 0, 4, 8, 10), strict=True))
        assert step["phases_ms"] == pytest.approx(phases)
        assert (step["all_reduce_ms"], step["hidden_ms"]) == pytest.approx((24, 20))


@pytest.mark.slow
def test_one_process_reports_no_all_reduce_and_its_phases_sum_to_the_wall_time(start, tmp_path):
    command = "accel-demo timeline --processes 1 --quick --model tiny_cnn".split()
    result = start([*command, "--output", tmp_path, "--json", tmp_path / "x.json"])
    assert result.returncode == 0, result.stderr
    assert "1 connected process on cpu" in result.stdout
    numbers = json.loads((tmp_path / "x.json").read_text())
    assert (numbers["processes"], numbers["bucket_bytes"], numbers["straggler"]) == (1, [], None)
    assert "all-reduce takes" not in result.stdout
    assert "a single process waits for no other" in result.stdout
    steps = [step for _, step in steps_of(numbers)]
    assert median(step["all_reduce_ms"] for step in steps) < 0.5  # DDP still calls all-reduce
    assert median(sum(s["phases_ms"].values()) / s["wall_ms"] for s in steps) > 0.95


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("processes", [2, 3])
def test_a_slow_rank_is_named_in_20_of_20_runs_and_none_in_20_runs_without_one(
    together, tmp_path, processes
):
    """Profile complete training runs in one launch, alternately without and with a slow rank."""
    run = ProfileSettings(SMALL, straggler.STEPS_NEEDED, bucket_mb=25.0)
    runs = [run, replace(run, straggler=(1, 20.0))] * 20
    by_rank = together(profiled, processes, timeout=1500, runs=runs, folder=str(tmp_path))
    names, slower = [], []
    for profiles in zip(*by_rank, strict=True):
        assert [profile.processes for profile in profiles] == [processes] * processes
        ranks, slow_rank = rank_timelines(profiles, merge.load(profiles))
        names.append(slow_rank)
        slower.append([round(sum(rank.slower_ms.values()), 1) for rank in ranks])
    without, delayed = names[::2], names[1::2]
    assert (without.count(None), delayed.count(1)) == (20, 20), (
        f"without a straggler, no rank was named in {without.count(None)} of 20 runs; "
        f"with a straggler, rank 1 was named in {delayed.count(1)} of 20 runs.\n"
        f"named without a straggler: {without}\nslower by (ms): {slower[::2]}\n"
        f"named with a straggler: {delayed}\nslower by (ms): {slower[1::2]}"
    )


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_overlap_vanishes_when_one_bucket_holds_all_gradients(start, tmp_path):
    """A single bucket is sent after backward; with many buckets, most are sent during backward."""
    command = "accel-demo timeline --bucket-mb 1,1000 --repeats 1".split()
    result = start([*command, "--output", tmp_path, "--json", tmp_path / "x.json"], timeout=300)
    assert result.returncode == 0, result.stderr
    many, single = json.loads((tmp_path / "x.json").read_text())["sweep"]
    assert (single["buckets"], many["buckets"] > 5) == (1, True)
    assert single["hidden_share"] < 0.2 < many["hidden_share"]


@pytest.mark.parametrize(("bucket_mb", "first_mb"), [(25.0, 1.0), (5.0, 5.0), (100.0, 100.0)])
def test_the_default_bucket_size_keeps_ddps_small_first_bucket(bucket_mb, first_mb):
    run = ProfileSettings(TrainConfig(), steps=1, bucket_mb=bucket_mb)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with recording.changes(run):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()
    assert model._bucket_config.first_bucket_bytes_cap == first_mb * 2**20

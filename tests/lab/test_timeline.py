import json
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.timeline import command as timeline
from accel_demo.lab.timeline import merge, recording, straggler
from accel_demo.lab.timeline import spans as stretches
from accel_demo.lab.timeline.phases import PHASES, Timeline, found_of
from accel_demo.models import make_model
from tests.conftest import REPOSITORY, run_to_end

SMALL = {"model": "small_cnn", "batch_size": 16}


@pytest.fixture(scope="module")
def verb(tmp_path_factory):
    """The verb, called once: its output, its JSON, its merged trace, its folder."""
    folder = tmp_path_factory.mktemp("timeline")
    result = run_to_end(
        "accel-demo timeline --quick --steps 6 --model small_cnn --batch-size 16".split()
        + "--straggler 1:20ms --bucket-mb 25,0.05".split()
        + ["--output", folder / "out", "--json", folder / "x.json", "--plot", folder / "x.svg"],
        timeout=300,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((folder / "x.json").read_text())
    trace = json.loads((folder / "out" / "trace.json").read_text())
    return result.stdout, found, trace, folder


@pytest.fixture(scope="module")
def others(together, tmp_path_factory):
    """Three more runs in one launch: one as it is, one that accumulates, one with a clock that is
    40 ms ahead. Of each: what the ranks have found, their traces, and what they tell together."""
    folder = tmp_path_factory.mktemp("others")
    run = {"choices": SMALL, "steps": 8, "bucket_mb": 25.0, "straggler": None}
    runs = [{**run, "steps": straggler.STEPS_NEEDED}]
    runs += [{**run, "choices": {**SMALL, "accumulate": 2}}, {**run, "clock_ahead_ms": 40}]
    by_rank = together(profiled, 2, timeout=300, runs=runs, folder=str(folder))
    by_run = [list(of_run) for of_run in zip(*by_rank, strict=True)]
    assert {found["processes"] for of_run in by_run for found in of_run} == {2}
    traces = [merge.load(of_run) for of_run in by_run]
    return [(*each, found_of(*each)) for each in zip(by_run, traces, strict=True)]


def profiled(device, runs, folder):
    return recording.profile_runs(device, runs, folder)


def steps_of(found):
    return [(rank, step) for rank in found["ranks"] for step in rank["steps"]]


def test_two_connected_processes_were_profiled(verb):
    stdout, found, _, _ = verb
    assert "2 connected processes on cpu (gloo)" in stdout
    assert (found["processes"], found["backend"], found["device"]) == (2, "gloo", "cpu")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert [len(rank["steps"]) for rank in found["ranks"]] == [6, 6]


def test_the_phases_of_a_step_sum_to_its_wall_time(verb, others):
    """The wall time is read around the step from another clock than the trace's. Between the two
    the system may give the core away, so a single step may well be longer by the wall's."""
    for found in (verb[1], *(found for _, _, found in others)):
        for rank in found["ranks"]:
            sums = [sum(step["phases_ms"].values()) for step in rank["steps"]]
            walls = [step["wall_ms"] for step in rank["steps"]]
            shares = [own / wall for own, wall in zip(sums, walls, strict=True)]
            assert {tuple(step["phases_ms"]) for step in rank["steps"]} == {tuple(PHASES)}
            assert max(shares) < 1.01
            assert median(shares) == pytest.approx(1, rel=0.05)
            assert sum(sums) == pytest.approx(sum(walls), rel=0.05)


def test_a_pause_in_forward_is_told_as_forward(verb):
    """How long it is, `time.sleep` knows: another clock than the trace's."""
    for rank, step in steps_of(verb[1]):
        if rank["rank"] == 1:
            assert step["phases_ms"]["forward"] > 19.9


def test_every_moment_of_a_step_is_in_exactly_one_phase(verb):
    for rank, step in steps_of(verb[1]):
        bars = [bar for bar in rank["bars"] if bar["step"] == step["step"]]
        bars = [bar for bar in bars if bar["lane"] == "compute"]
        ends = [step["start_ms"], *(bar["end_ms"] for bar in bars)]
        starts = [*(bar["start_ms"] for bar in bars), step["end_ms"]]
        assert starts == pytest.approx(ends)
        for phase, milliseconds in step["phases_ms"].items():
            drawn = sum(b["end_ms"] - b["start_ms"] for b in bars if b["phase"] == phase)
            assert drawn == pytest.approx(milliseconds)


def test_what_is_sent_in_a_step_are_ddps_buckets_and_they_hold_every_gradient(verb, others):
    found = verb[1]
    gradients = sum(p.numel() for p in make_model(TrainConfig(model="small_cnn")).parameters())
    assert sum(found["bucket_bytes"]) == 4 * gradients
    of_rank, _, accumulating = others[1]
    for run in (found, {**accumulating, "bucket_bytes": of_rank[0]["bucket_bytes"]}):
        for rank, step in steps_of(run):
            sent = [bar for bar in rank["bars"] if bar["name"] == "gloo:all_reduce"]
            sizes = [bar["bytes"] for bar in sent if bar["step"] == step["step"]]
            assert sorted(sizes) == sorted(run["bucket_bytes"])


def test_a_step_that_accumulates_reads_two_batches_and_shares_its_gradients_once(others):
    (_, _, plain), (_, _, accumulating), _ = others
    for found, batches in ((plain, 1), (accumulating, 2)):
        for rank, step in steps_of(found):
            phases = [bar["phase"] for bar in rank["bars"] if bar["step"] == step["step"]]
            assert phases.count("data wait") == batches


def test_small_buckets_are_more_all_reduces(verb):
    one, several = verb[1]["sweep"]
    assert (one["bucket_mb"], several["bucket_mb"]) == (25, 0.05)
    assert one["buckets"] == 1 < several["buckets"] == len(verb[1]["bucket_bytes"])
    assert "| bucket MiB |" in verb[0]
    assert "the buffers of BatchNorm" in verb[0], "small_cnn has some"


def test_no_more_is_hidden_than_is_sent(verb):
    for rank, step in steps_of(verb[1]):
        assert step["hidden_ms"] >= 0
        assert step["hidden_ms"] + step["exposed_ms"] <= step["all_reduce_ms"] + 1e-6
        assert 0 <= step["exposed_ms"] <= step["phases_ms"]["all-reduce"] + 1e-6
        sent = [bar for bar in rank["bars"] if bar["lane"] == "communication"]
        longest = max(bar["end_ms"] - bar["start_ms"] for bar in sent)
        assert step["all_reduce_ms"] <= sum(bar["end_ms"] - bar["start_ms"] for bar in sent)
        assert longest > 0
    assert all(0 <= rank["hidden_share"] <= 1 for rank in verb[1]["summary"])


def test_a_rank_that_is_held_up_is_named_and_nobody_else(verb, others):
    assert verb[1]["straggler"]["rank"] == 1
    assert verb[1]["straggler"]["slower_ms"] == pytest.approx(20, abs=10)
    assert "rank 1 is slow" in verb[0]
    assert others[0][2]["straggler"] is None


def barriers_of(trace):
    """The (start, end) of each barrier by rank, in ms."""
    events = [e for e in trace["traceEvents"] if e["name"] == "barrier" and e["ph"] == "X"]
    by_rank = [[e for e in events if e["pid"] == pid] for pid in sorted({e["pid"] for e in events})]
    spans = [[(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in own] for own in by_rank]
    assert len(spans) == 2
    assert {len(own) for own in spans} == {recording.BARRIERS}
    return list(zip(*spans, strict=True))


def line_up(trace):
    """Whether no rank leaves a barrier 1 ms before another has come, and whether those in which
    nobody was held up are left together, within 1 ms."""
    barriers = barriers_of(trace)
    left_early = [max(s for s, _ in barrier) - min(e for _, e in barrier) for barrier in barriers]
    apart = [max(e for _, e in barrier) - min(e for _, e in barrier) for barrier in barriers]
    return max(left_early) < 1 and sorted(apart)[len(apart) // 4] < 1


def test_a_barrier_lines_up_in_the_merged_trace(verb, others):
    assert line_up(verb[2])
    assert line_up(merge.merged(others[0][1]))


def test_a_clock_that_is_ahead_is_measured_and_lines_up_all_the_same(others):
    (zero, one), traces, _ = others[2]
    assert zero["clock_ahead_ns"] == 0
    assert one["clock_ahead_ns"] / 1e6 == pytest.approx(40, abs=1)
    assert line_up(merge.merged(traces))
    uncorrected = merge.load([zero, {**one, "clock_ahead_ns": 0}])
    assert not line_up(merge.merged(uncorrected))


def test_the_merged_trace_shows_each_rank_as_a_process_with_its_name(verb):
    events = verb[2]["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {"rank 0", "rank 1"}
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in complete} == set(names.values())
    assert min(e["ts"] for e in complete) == 0
    assert all(e["dur"] >= 0 for e in complete)
    arrows = [(e["id"], e["ph"]) for e in events if e["ph"] in "sf"]
    assert len(arrows) == len(set(arrows)) > 0


def test_every_file_is_written_and_named(verb):
    stdout, _, _, folder = verb
    for path in ("out/trace.json", "out/timeline.html", "x.json", "x.svg"):
        assert (folder / path).stat().st_size > 1000
        assert str(folder / path) in stdout


def test_nothing_is_left_where_writing_fails(tmp_path, monkeypatch):
    """The page cannot be written: then nor is the trace, which came before it."""
    from accel_demo.lab.timeline import page as timeline_page

    def fail(found, path):
        raise OSError("no space left")

    monkeypatch.setattr(timeline_page, "write", fail)
    options = timeline.read(["--output", str(tmp_path / "out"), "--json", str(tmp_path / "x.json")])
    (tmp_path / "files").mkdir()
    with pytest.raises(OSError, match="no space left"):
        timeline.write({}, [synthetic(0)], tmp_path / "files", options)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--processes 2,3", "argument --processes: invalid int value: '2,3'"),
        ("--processes 0", "--processes must be at least 1, got 0"),
        ("--steps 1", "--steps must be from 2 to 100, got 1"),
        ("--batch-size 0", "batch_size must be at least 1, got 0"),
        ("--batch-size 5000", "choose a smaller --batch-size"),
        ("--batch-size 1 --model resnet18", "resnet18 takes batches of two images or more"),
        ("--accumulate 0", "accumulate must be at least 1, got 0"),
        ("--model vgg12", "invalid choice: 'vgg12'"),
        ("--bucket-mb big", "--bucket-mb takes 25, or 0.05,0.5,25; got big"),
        ("--bucket-mb 25,0", "--bucket-mb must be from 0.001 to 10000, got 25,0"),
        ("--bucket-mb nan", "--bucket-mb must be from 0.001 to 10000, got nan"),
        ("--straggler 1", "--straggler takes RANK:MILLISECONDSms, such as 1:20ms; got 1"),
        ("--straggler 2:20ms", "--straggler: 2 processes have no rank 2"),
        ("--straggler 1:0ms", "--straggler must be above 0 and at most 10000ms, got 0ms"),
        ("--straggler 0:20ms --processes 1", "--straggler needs other ranks"),
        ("--output pyproject.toml/x", "cannot write into --output pyproject.toml/x"),
        ("--plot x.svg --json x.svg", "x.svg cannot hold two outputs"),
        ("--plot x.gif", "--plot takes a .png, .svg or .pdf file, got x.gif"),
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(arguments, message, monkeypatch):
    monkeypatch.setattr(timeline, "measure", None)
    with pytest.raises(UserError) as error:
        timeline.main([*arguments.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_looking_whether_the_folder_can_be_written_leaves_no_trace_of_it(tmp_path):
    timeline.read(["--output", str(tmp_path / "a" / "b")])
    assert not (tmp_path / "a").exists()


def test_what_is_in_the_folder_already_stays_and_a_folder_in_the_way_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    timeline.read(["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="trace.json cannot hold two outputs"):
        timeline.read(["--output", str(tmp_path), "--json", str(tmp_path / "trace.json")])
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(UserError, match="trace.json: it is a folder"):
        timeline.read(["--output", str(tmp_path)])


# Made-up traces: what is right is known to the millisecond.

STEP_MS = 100


def synthetic(rank, steps=8, delays=None, jitter=0.0, slower=1.0, gpu=False):
    """A trace of steps in which a rank with delays comes later, and the others wait for it.

    `delays` has the ms of each step in which every rank starts later to compute, by rank. A
    step in four, by chance, is longer by up to `jitter` ms.
    """
    delays = delays or [[0.0] * steps]
    noise = random.Random(rank)
    events, clock = [], 0.0

    def event(name, start, end, cat="cpu_op", tid=1, **args):
        times = {"ts": start, "dur": end - start}
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "args": args})
        events[-1].update(times)

    for step in range(steps):
        late = delays[rank][step] + jitter * noise.random() * (noise.random() < 0.25)
        latest = max(own[step] for own in delays) + jitter
        event(f"step {step + 1}", clock, clock + STEP_MS + latest, "user_annotation")
        event("data wait", clock, clock + 5, "user_annotation")
        event("aten::index_select", clock + 1, clock + 4)
        event("forward", clock + 10, clock + 30 + late, "user_annotation")
        event("aten::conv2d", clock + 10 + late, clock + 30 + late)
        event("backward", clock + 30 + late, clock + 80 + latest, "user_annotation")
        event("aten::mm", clock + 30 + late, clock + 70 + late)
        event("c10d::allreduce_", clock + 50 + late, clock + 51 + late)
        sizes = {"Input Dims": [[1000, 2]], "Input type": ["float"]}
        event(
            "gloo:all_reduce", clock + 50 + late, clock + 80 + latest, "user_annotation", 2, **sizes
        )
        event("optimizer", clock + 80 + latest, clock + 95 + latest, "user_annotation")
        event("aten::add_", clock + 80 + latest, clock + 95 + latest)
        clock += STEP_MS + latest
    return {"traceEvents": sorted(events, key=lambda e: e["ts"])}


def found_in(traces, steps=8):
    walls = {"wall_ms": dict.fromkeys(range(1, steps + 1), STEP_MS), "clock_ahead_ns": 0}
    return found_of([walls] * len(traces), traces)


def named(delays, jitter=0.0):
    """The rank named where each rank is held up so many ms in each step."""
    steps = len(delays[0])
    traces = [synthetic(rank, steps, delays, jitter) for rank in range(len(delays))]
    straggler = found_in(traces, steps)["straggler"]
    return straggler and straggler["rank"]


def test_a_made_up_step_is_classified_to_the_millisecond():
    found = found_in([synthetic(0)])
    for step in found["ranks"][0]["steps"]:
        assert step["phases_ms"] == pytest.approx(
            {
                "data wait": 5,
                "forward": 20,
                "backward": 40,
                "all-reduce": 10,
                "optimizer": 15,
                "idle": 10,
            }
        )
        assert step["all_reduce_ms"] == pytest.approx(30)
        assert step["hidden_ms"] == pytest.approx(20)
        assert step["exposed_ms"] == pytest.approx(10)
    assert found["summary"][0]["hidden_share"] == pytest.approx(2 / 3)
    assert {bar["bytes"] for bar in found["ranks"][0]["bars"]} == {None, 8000}


def test_waiting_for_buffers_is_no_part_of_the_all_reduce_that_is_exposed():
    trace = synthetic(0, steps=2)
    for step in range(2):
        event = {"ph": "X", "cat": "user_annotation", "name": "gloo:broadcast", "pid": 7, "tid": 2}
        start = step * STEP_MS + 10
        for moved in trace["traceEvents"]:  # forward waits for 5 ms before it computes
            if moved["name"] == "aten::conv2d" and moved["ts"] == start:
                moved["ts"], moved["dur"] = start + 5, 15
        trace["traceEvents"].append({**event, "ts": start, "dur": 5, "args": {}})
    for step in found_in([trace], steps=2)["ranks"][0]["steps"]:
        assert step["phases_ms"]["all-reduce"] == pytest.approx(15)
        assert (step["all_reduce_ms"], step["exposed_ms"]) == pytest.approx((30, 10))


def test_who_is_late_is_waited_for():
    found = found_in([synthetic(rank, 8, [[0] * 8, [20] * 8]) for rank in range(2)])
    waiting, late = found["summary"]
    assert waiting["phases_ms"]["all-reduce"] - late["phases_ms"]["all-reduce"] == pytest.approx(20)
    assert (waiting["late_ms"], late["late_ms"]) == pytest.approx((0, 20))
    assert found["straggler"] == {"rank": 1, "slower_ms": pytest.approx(20)}


@pytest.mark.parametrize(
    ("delays", "rank"),
    [
        ([[0] * 16, [20] * 16], 1),
        ([[20] * 16, [0] * 16], 0),
        ([[0] * 16, [0] * 16], None),
        ([[0] * 16, [4] * 16], None),  # less than LEAST_MS
        ([[0] * 16, [6] * 16], 1),
        ([[0] * 16, [0] * 15 + [500]], None),  # one slow step is an accident
        ([[0] * 16, [0] + [20] * 15], None),  # a slow rank is slow in every step
        ([[0] * 16, [0, 200] * 8], None),
        ([[0, 300] * 8, [20] * 16], None),  # with such noise nobody can tell
        ([[0] * 14 + [900] * 2, [20] * 16], 1),  # the other one is slower on average
        ([[10] * 16, [30, 300] * 8], 1),
        ([[0] * 16, [20] * 16, [0] * 16], 1),
        ([[0] * 16, [20] * 16, [40] * 16], 2),  # two slow ones: the slower one
        ([[20] * 16, [20] * 16, [60] * 16], 2),
    ],
)
def test_the_rank_that_is_slow_in_every_step_is_named(delays, rank):
    assert named(delays) == rank
    assert named(delays, jitter=300.0) == rank


@pytest.mark.parametrize("jitter", [5.0, 50.0, 500.0])
def test_jitter_alone_names_nobody(jitter):
    assert named([[0] * 16] * 2, jitter) is None
    assert named([[0] * 16] * 3, jitter) is None


def test_a_rank_is_slow_when_it_is_so_against_a_steps_length_too():
    short = [{("op", 0): [100.0] * 8}, {("op", 0): [110.0] * 8}]
    long = [{("op", 0): [1000.0] * 8}, {("op", 0): [1010.0] * 8}]
    assert straggler.slow_rank(short) == (1, [0.0, 10.0])
    assert straggler.slow_rank(long) == (None, [0.0, 10.0])


def test_the_pieces_of_a_step_and_its_waiting_are_all_of_it():
    (_, late) = found_in([synthetic(r, 8, [[0] * 8, [20] * 8]) for r in range(2)])["ranks"]
    timeline_of_late = Timeline(synthetic(1, 8, [[0] * 8, [20] * 8]))
    pieces = straggler.pieces_of(timeline_of_late)
    for number, step in enumerate(late["steps"]):
        computed = sum(times[number] for times in pieces.values())
        waited = step["phases_ms"]["all-reduce"]
        assert computed + waited == pytest.approx(step["end_ms"] - step["start_ms"])


def test_what_only_one_rank_does_in_every_step_makes_it_slow_and_an_accident_does_not():
    both = {("operator", "aten::mm", 0): [10.0] * 8}
    more = {**both, ("operator", "aten::sort", 0): [7.0] * 8}
    once = {**both, ("operator", "aten::sort", 0): [7.0]}
    assert straggler.slow_rank([more, both]) == (0, [7.0, 0.0])
    assert straggler.slow_rank([both, more, both]) == (1, [0.0, 7.0, 0.0])
    assert straggler.slow_rank([once, both]) == (None, [0.0, 0.0])
    assert straggler.slow_rank([more]) == (None, [0.0])


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=8).map(
    lambda pairs: stretches.union([(start, start + size) for start, size in pairs])
)


@given(spans, spans)
def test_spans_are_sets_of_moments(one, other):
    def moments(spans):
        return {moment for start, end in spans for moment in range(start, end)}

    assert moments(stretches.intersect(one, other)) == moments(one) & moments(other)
    assert moments(stretches.subtract(one, other)) == moments(one) - moments(other)
    assert stretches.length(stretches.subtract(one, other)) == len(moments(one) - moments(other))
    assert moments(stretches.union([*one, *other])) == moments(one) | moments(other)


def test_on_a_gpu_the_phase_of_a_kernel_is_that_of_its_launch():
    """The host is ahead: backward is launched while the GPU computes forward, and so on."""
    trace = synthetic(0, steps=2)
    events = trace["traceEvents"]
    events[:] = [e for e in events if e["cat"] == "user_annotation" and e["tid"] == 1]
    for step in range(2):
        start, launches = step * STEP_MS, [(2, "copy"), (12, "conv"), (40, "mm"), (85, "adam")]
        runs = {"copy": (2, 8), "conv": (14, 54), "mm": (54, 84), "adam": (90, 98)}
        for number, (at, name) in enumerate(launches):
            link = {"correlation": 10 * step + number}
            shared = {"ph": "X", "name": name, "args": link}
            begin, end = runs[name]
            kind = "gpu_memcpy" if name == "copy" else "kernel"
            events.append({**shared, "cat": "cuda_runtime", "pid": 7, "tid": 9, "dur": 0.1})
            events[-1]["ts"] = start + at
            events.append({**shared, "cat": kind, "pid": 0, "tid": 3, "dur": end - begin})
            events[-1]["ts"] = start + begin
        nccl = {"ph": "X", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "cat": "kernel"}
        events.append({**nccl, "pid": 0, "tid": 4, "ts": start + 64, "dur": 24, "args": {}})
    found = found_in([trace], steps=2)
    for step in found["ranks"][0]["steps"]:
        assert step["phases_ms"] == pytest.approx(
            {
                "data wait": 8,  # 3 ms until the next mark, and its copy
                "forward": 40,
                "backward": 30,
                "all-reduce": 4,
                "optimizer": 8,
                "idle": 10,
            }
        )
        assert (step["all_reduce_ms"], step["hidden_ms"]) == pytest.approx((24, 20))


@pytest.mark.slow
def test_one_process_has_no_all_reduce_and_the_same_phases(start, tmp_path):
    command = "accel-demo timeline --processes 1 --quick --model tiny_cnn".split()
    result = start([*command, "--output", tmp_path, "--json", tmp_path / "x.json"])
    assert result.returncode == 0, result.stderr
    assert "1 connected process on cpu" in result.stdout
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["processes"], found["bucket_bytes"], found["straggler"]) == (1, [], None)
    assert "under way" not in result.stdout and "one process waits for nobody" in result.stdout
    steps = [step for _, step in steps_of(found)]
    assert median(step["all_reduce_ms"] for step in steps) < 0.5  # a DDP of one sends to itself
    assert median(sum(s["phases_ms"].values()) / s["wall_ms"] for s in steps) > 0.95


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("processes", [2, 3])
def test_a_slow_rank_is_named_in_20_of_20_runs_and_nobody_in_20_without(
    together, tmp_path, processes
):
    """Each run is a whole training with a profile; they take turns, in one launch."""
    run = {"choices": SMALL, "steps": straggler.STEPS_NEEDED, "bucket_mb": 25.0}
    runs = [{**run, "straggler": each} for _ in range(20) for each in (None, (1, 20.0))]
    by_rank = together(profiled, processes, timeout=1500, runs=runs, folder=str(tmp_path))
    names, slower = [], []
    for of_run in zip(*by_rank, strict=True):
        assert [found["processes"] for found in of_run] == [processes] * processes
        found = found_of(list(of_run), merge.load(list(of_run)))
        names.append(found["straggler"] and found["straggler"]["rank"])
        slower.append([round(rank["slower_ms"], 1) for rank in found["summary"]])
    without, delayed = names[::2], names[1::2]
    assert (without.count(None), delayed.count(1)) == (20, 20), (
        f"nobody was named in {without.count(None)} of 20 runs without a straggler, "
        f"rank 1 in {delayed.count(1)} of 20 with one.\n"
        f"named without: {without}\nslower by (ms): {slower[::2]}\n"
        f"named with: {delayed}\nslower by (ms): {slower[1::2]}"
    )


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_overlap_vanishes_when_one_bucket_holds_all_gradients(start, tmp_path):
    """With one bucket the all-reduce starts when backward has ended; with many it has company."""
    command = "accel-demo timeline --bucket-mb 1,1000".split()
    result = start([*command, "--output", tmp_path, "--json", tmp_path / "x.json"], timeout=300)
    assert result.returncode == 0, result.stderr
    many, one = json.loads((tmp_path / "x.json").read_text())["sweep"]
    assert (one["buckets"], many["buckets"] > 5) == (1, True)
    assert one["hidden_share"] < 0.2 < many["hidden_share"]

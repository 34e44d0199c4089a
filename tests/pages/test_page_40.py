"""Page 40: recorded timelines, profiling one's own script, and the exercise on five traces."""

import gzip
import json
import random
import re
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_demo.errors import UserError
from accel_demo.lab.timeline import findings
from accel_demo.lab.timeline.straggler import LEAST_MS, LEAST_SHARE, slow_rank
from tests.conftest import REPOSITORY, run_ranks
from tests.pages.pages import (
    EXERCISES,
    TUTORIALS,
    load_grader,
    load_module,
    mistake_in,
    rows_below,
    transcript,
)

PAGE = TUTORIALS / "40_where_the_time_goes.md"
ANSWER = load_module(EXERCISES / "answers" / "40_cause.py")
GRADER = load_grader("40")
COMPARE = load_module(TUTORIALS / "40_compare.py")
RECORD = load_module(TUTORIALS / "40_record.py")


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", ["timeline", "profile", "buckets"])
def test_each_transcript_matches_its_commands_and_is_on_the_page(name):
    page, recorded = PAGE.read_text(), transcript(name)
    assert list(recorded) == RECORD.RECORDS[name]
    for command, output in recorded.items():
        if name == "buckets":  # the page shows only the last table
            output = output[output.index("| bucket MiB") :]
        assert output.split("\nwrote runs")[0].strip() in page
        assert ("2 connected processes" in output) == (
            command.startswith("accel-demo") and name != "buckets"
        )
        for picture in re.findall(r"--plot tutorials/(\S+)", command):
            assert (TUTORIALS / picture).exists() and f"]({picture})" in page


def rank_rows(output: str) -> list[dict[str, float]]:
    """Return the numbers of each rank in the table of `accel-demo timeline`."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()]
    [head] = [cells for cells in lines if cells[:1] == ["rank"]]
    rows = [cells for cells in lines if re.fullmatch(r"\d+", "".join(cells[:1]))]
    return [dict(zip(head, map(float, cells), strict=True)) for cells in rows]


def test_both_timelines_were_measured_in_turn_and_the_median_runs_are_shown():
    """The page shows the table of all runs. Its medians are those of the runs it shows."""
    runs = TUTORIALS / "transcripts/timeline_runs.txt"
    assert runs.read_text().strip() in PAGE.read_text()
    rows = rows_below(runs, "command")
    assert [f"{row[0].strip('`')} --plot" for row in rows] == [
        command.rsplit(" ", 1)[0] for command in transcript("timeline")
    ]
    without, with_straggler = ([float(ms) for ms in row[1].split(", ")] for row in rows)
    assert len(without) == len(with_straggler) == RECORD.RUNS == 5
    for row, times in zip(rows, (without, with_straggler), strict=True):
        assert round(float(row[2])) == sorted(times)[2]
    text = words_of(PAGE.read_text())
    longer = float(rows[1][2]) - float(rows[0][2])
    assert f"The median step is {longer:.0f} ms longer with the straggler" in text
    assert max(without) < min(with_straggler)
    for row, output in zip(rows, transcript("timeline").values(), strict=True):
        # One is the median over steps of rank 0's trace, the other of the time on its clock.
        assert rank_rows(output)[0]["step"] == pytest.approx(float(row[2]), rel=0.03)


def test_the_recorded_timeline_names_a_rank_only_if_there_is_a_straggler():
    first, straggler = transcript("timeline").values()
    assert "no rank is slower" in first and "rank 1 is slow" not in first
    assert "rank 1 is slow: it computes" in straggler


def test_the_recorded_profile_names_the_rank_that_waits_for_data_until_it_is_repaired():
    train, _, compare, repaired = transcript("profile").values()
    assert "**rank 1 is slow: it waits " in train and "longer for its data" in train
    assert "rank 1 is slow" not in repaired and "waits for its DataLoader" not in repaired
    text = words_of(PAGE.read_text())
    (_, *first), (_, *second) = (
        [float(cell) for cell in line.split("|")[1:-1]]
        for line in compare.splitlines()
        if re.match(r"\| +\d", line)
    )
    assert first[1] == 0.0 and first[2] > second[2] and f"last, {second[1]} ms after" in text
    assert f"with {second[0]} ms per step" in text and second[0] > first[0]
    runs = TUTORIALS / "transcripts/profile_runs.txt"
    assert runs.read_text().strip() in PAGE.read_text()
    (_, before, slow), (_, after, fast) = rows_below(runs, "command")
    assert f"The median step takes {fast} ms instead of {slow} ms." in text
    before, after = ([float(ms) for ms in times.split(", ")] for times in (before, after))
    assert len(before) == len(after) == RECORD.RUNS and max(after) < min(before)
    for times, output in ((before, train), (after, repaired)):
        assert rank_rows(output)[0]["step"] == pytest.approx(sorted(times)[2], rel=0.03)


def test_the_text_follows_from_the_recorded_numbers():
    text = words_of(PAGE.read_text())
    recorded = list(transcript("timeline").values())
    first, straggler = map(rank_rows, recorded)
    waits = [(row["rank wait"], row["message wait"]) for row in straggler]
    assert f'"rank wait" is {waits[0][0]} ms and rank 1\'s is {waits[1][0]} ms' in text
    assert f"It waits {waits[0][0]} ms for rank 1, and {waits[0][1]} ms for messages." in text
    assert f"By at least {sum(waits[1]):.1f} ms, the sum of its two waits" in text
    forward = [row["forward"] for row in straggler]
    assert f"takes {forward[0]} ms on rank 0 and {forward[1]} ms on rank 1" in text
    assert "forward is three times as long on rank 1" in text and forward[1] > 3 * forward[0]
    assert f"halves at most the {first[0]['message wait']} ms of waiting for messages" in text
    pattern = r"rank (\d): the all-reduce takes (\S+) ms, (\d+)% of it hidden under backward"
    (all_reduce, _), _ = (found[1:] for found in re.findall(pattern, recorded[0]))
    assert f"the all-reduce takes {all_reduce} ms on rank 0" in text
    assert f"make the step {float(all_reduce) / 2:.0f} ms shorter" in text
    (on_0, hidden_0), (on_1, hidden_1) = (found[1:] for found in re.findall(pattern, recorded[1]))
    assert f"rank 0 has all-reduces running for {on_0} ms per step, {hidden_0}% of" in text
    assert f"rank 1's all-reduce takes {on_1} ms, {hidden_1}% of it hidden" in text


def test_the_text_on_bucket_sizes_follows_from_the_sweep():
    text = words_of(PAGE.read_text())
    *several, one = rows_below(PAGE, "bucket MiB")
    assert [row[0] for row in several] == ["0.5", "2", "8", "25"] and one[0] == "100"
    assert f"the whole all-reduce is exposed ({one[3]} ms)." in text
    assert f"the exposed part is at most {max(float(row[3]) for row in several)} ms, but" in text
    backward = sorted(round(float(row[5])) for row in several)
    before = round(float(one[5]))
    assert f"Backward takes {backward[0]} to {backward[-1]} ms instead of {before} ms" in text
    assert backward[0] > before
    intervals = [[float(bound) for bound in row[7].split(" – ")] for row in (*several, one)]
    assert max(low for low, _ in intervals) < min(high for _, high in intervals), "all overlap"


def test_the_table_quotes_every_sentence_of_the_command():
    """Each quotation consists of parts of the sentences in the source, with numbers in between.

    Two rows are not about a finding: no rank is slow, or one is late for different reasons.
    """
    folder = REPOSITORY / "accel_demo/lab/timeline"
    source = (folder / "findings.py").read_text()
    kinds = set(re.findall(r'Finding\("([^"]*)"', source))
    kinds |= set(re.findall(r'kind, (?:text|where) = "([^"]*)"', source))
    rows = rows_below(PAGE, "what the command says")
    assert len(rows) == len(kinds) + 3 == 10  # one rank or all of them may wait for data
    limits = f"data below {findings.DATA_SHARE:.0%} of the step, or for messages below "
    assert f"{limits}{findings.MESSAGE_SHARE:.0%}" in PAGE.read_text()
    source += (folder / "tables.py").read_text().replace("{latest.rank}", "…")
    joined = re.sub(r'"\n\s+text \+= f?"', "", source)
    for quoted, *_ in rows:
        text = quoted.strip("`").replace("train.py:40: …", "…").replace("calls item", "calls …")
        text = text.replace("slow: it ", "slow: it … ")
        text = re.sub(r"^(each|all) ranks?\b|\b\d+\b", "…", text)
        for part in text.split("…"):
            assert part.strip() in joined, quoted


def test_the_page_names_the_limits_of_the_command():
    text = words_of(PAGE.read_text())
    assert f"delays add up to at least {LEAST_MS:.0f} ms and at least {LEAST_SHARE:.0%}" in text


def trace_of(rank: int, late: float) -> dict:
    """Return a trace as `torch.profiler` writes it: two steps of 20 ms, in µs."""
    events = [{"ph": "M", "name": "process_name", "pid": 77, "ts": 0.0, "args": {"name": "python"}}]
    for step in (0, 1):
        spans = {
            f"ProfilerStep#{step + 4}": (0, 20, 1),
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": (1, 1 + late, 1),
            "aten::relu": (2 + late, 3 + late, 1),
            "gloo:all_reduce": (5 + late, 18, 2),
        }
        for name, (start, end, tid) in spans.items():
            times = {"ts": 1e3 * (20 * step + start), "dur": 1e3 * (end - start)}
            events.append({"ph": "X", "cat": "x", "name": name, "pid": 77, "tid": tid, **times})
        events[-1:] = [{**events[-1], "ts": events[-1]["ts"] - 500}, events[-1]]  # they overlap
    return {
        "distributedInfo": {"rank": rank},
        "baseTimeNanoseconds": 1_000_000 * rank,
        "traceEvents": events,
    }


def test_traces_are_compared_on_one_clock(tmp_path):
    for rank, late in enumerate((0.5, 4)):
        (tmp_path / f"{9 - rank}.json").write_text(json.dumps(trace_of(rank, late)))
    ranks = COMPARE.load(tmp_path)
    # Rank 1's trace begins 1 ms later, so its all-reduce starts 3.5 + 1 ms later.
    assert COMPARE.compare(ranks) == [[0, 0.5, 0.0, 12.5, 20.0], [1, 4.0, 4.5, 9.0, 20.0]]


def test_events_in_a_row_of_the_merged_trace_never_overlap_partly(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"{rank}.json").write_text(json.dumps(trace_of(rank, 2)))
    assert_rows_nest(COMPARE.merged(COMPARE.load(tmp_path)))


def assert_rows_nest(trace: dict) -> None:
    """Perfetto drops an event that overlaps another one in its row, and isn't inside of it."""
    rows: dict[tuple, list] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            span = event["ts"], event["ts"] + event["dur"]
            rows.setdefault((event["pid"], event["tid"]), []).append(span)
    assert rows
    for spans in rows.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            open_ends = [other for other in open_ends if other > start + 0.002]  # rounded to 1 ns
            assert all(end <= other + 0.002 for other in open_ends)
            open_ends.append(end)


@pytest.mark.parametrize("case", GRADER.STORED, ids=lambda case: case.name)
def test_perfetto_can_show_each_event_of_a_stored_trace(case):
    assert_rows_nest(GRADER.make(case))


def test_the_trace_to_judge_by_eye_shows_its_cause_and_none_of_our_phases():
    file = GRADER.TRACES / "e.json.gz"
    assert file.stat().st_size < 300_000
    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert_rows_nest(trace)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["name"] for event in events}
    assert not names & {"forward", "backward", "optimizer", "data wait"}
    of_rank = {
        rank: [
            {**e, "ts": e["ts"] / 1e3, "dur": e["dur"] / 1e3} for e in events if e["pid"] == rank
        ]
        for rank in (0, 1)
    }
    (_, data_0, late_0, length_0, _), (_, data_1, late_1, length_1, _) = COMPARE.compare(of_rank)
    assert late_0 > 10 and late_1 == 0 and length_1 > 2 * length_0, "rank 0 is late"
    assert abs(data_0 - data_1) < 3, "not because of its data"
    _, rank, operator = GRADER.BY_EYE
    only = {e["name"] for e in of_rank[rank]} - {e["name"] for e in of_rank[1 - rank]}
    assert operator in only
    times = [e["dur"] for e in of_rank[rank] if e["name"] == operator]
    assert len(times) == 4 and min(times) > 10


def test_the_stored_traces_are_up_to_date_and_small():
    for case in GRADER.STORED:
        file = GRADER.TRACES / case.name
        assert json.loads(file.read_text()) == GRADER.make(case)
        assert file.stat().st_size < 60_000


def delays(case, rank: int) -> list[float]:
    """Return, for each step, how many ms later than every other rank this rank is ready."""
    last = {
        rank: [start for start, _ in all_reduces[1::2]]
        for rank, all_reduces in ANSWER.spans(GRADER.make(case), "gloo:all_reduce").items()
    }
    others = [starts for other, starts in last.items() if other != rank]
    return [own - max(rest) for own, *rest in zip(last[rank], *others, strict=True)]


@pytest.mark.parametrize("case", GRADER.STORED + GRADER.MORE, ids=lambda case: case.name)
def test_each_trace_has_one_cause_which_the_command_would_also_find(case):
    trace = GRADER.make(case)
    name, rank = case.cause
    assert ANSWER.cause(trace) == case.cause
    assert GRADER.longest_all_reduce(trace) != rank
    generator = random.Random(case.name)
    durations = [
        [GRADER.phase_durations(case, rank, step, generator) for rank in range(case.ranks)]
        for step in range(GRADER.STEPS)
    ]
    times_by_rank = [
        {
            (phase, "gap", "", 0): [step[rank][phase] for step in durations]
            for phase in durations[0][0]
        }
        for rank in range(case.ranks)
    ]
    assert slow_rank(times_by_rank)[0] == rank


@pytest.mark.parametrize("case", GRADER.STORED + GRADER.MORE, ids=lambda case: case.name)
def test_no_trace_is_close_to_the_limits_of_the_exercise(case):
    trace, slow = GRADER.make(case), case.cause[1]
    for rank in range(case.ranks):
        late = delays(case, rank)
        assert (median(late) > 10) if rank == slow else (median(late) < 2)
        assert sum(delay >= 5 for delay in late) in (range(11, 13) if rank == slow else range(3))
    begins, ends = ANSWER.spans(trace, "data wait"), ANSWER.spans(trace, "optimizer")
    all_reduces = ANSWER.spans(trace, "gloo:all_reduce")
    last = {rank: spans[1::2] for rank, spans in all_reduces.items()}
    for name, phases in (("data", begins), ("communication", last)):
        shares = [
            median(
                (end - start) / (step_end - step_start)
                for (start, end), (step_start, _), (_, step_end) in zip(
                    phases[rank], begins[rank], ends[rank], strict=True
                )
            )
            for rank in range(case.ranks)
        ]
        if case.cause == (name, None):
            assert min(shares) > 0.25
        elif slow is None and case.cause != ("data", None):  # then the second cause may apply, too
            assert min(shares) < 0.15


def test_a_rank_5_ms_later_than_the_first_need_not_be_slow():
    [healthy] = [case for case in GRADER.STORED if case.cause == ("nothing", None)]
    starts = ANSWER.spans(GRADER.make(healthy), "gloo:all_reduce").values()
    last = list(zip(*(all_reduces[1::2] for all_reduces in starts), strict=True))
    late = [median(step[rank][0] - min(step)[0] for step in last) for rank in range(healthy.ranks)]
    assert max(late) > 5


@given(st.integers(2, 6), st.data())
def test_our_answer_finds_the_rank_that_is_late_in_most_steps(ranks, data):
    slow = data.draw(st.none() | st.integers(0, ranks - 1))
    phase = data.draw(st.sampled_from(["data wait", "forward", "backward", "optimizer"]))
    once = {(data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 11))): 50}
    name = "nothing" if slow is None else "data" if phase == "data wait" else "computation"
    late = {} if slow is None else {slow: data.draw(st.floats(13, 40))}
    case = GRADER.Case(
        str(data.draw(st.integers(0, 99))), ranks, (name, slow), late, phase, once=once
    )
    assert ANSWER.cause(GRADER.make(case)) == (name, slow)


def test_the_model_answer_reads_a_trace_that_the_timeline_has_merged():
    from accel_demo.lab.timeline.merge import merged

    def of_rank(shift):
        names = ("step 4", "forward", "gloo:all_reduce")
        spans = [(0, 9), (1, 2), (3 + shift, 5)]
        return {
            "traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": n, "pid": 77, "tid": 1}
                | {"ts": a + 50.0, "dur": b - a}
                for n, (a, b) in zip(names, spans, strict=True)
            ]
        }

    found = ANSWER.spans(merged([of_rank(0), of_rank(1)]), "gloo:all_reduce")
    assert found == {0: [(3.0, 5.0)], 1: [(4.0, 5.0)]}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (2, 'returns 2. Return a pair, such as ("computation", 2)'),
        (("disk", None), "returns ('disk', None). Return a pair"),
        (("computation", None), "The second item must be a rank, an int from 0 to 3"),
        (("computation", "2"), "The second item must be a rank, an int from 0 to 3"),
        (
            ("communication", 2),
            '"communication" concerns all ranks, so the second item must be None',
        ),
    ],
)
def test_the_grader_explains_results_in_a_wrong_form(tmp_path, result, message):
    answer = tmp_path / "answer.py"
    answer.write_text(f"BY_EYE = {GRADER.BY_EYE!r}\n\n\ndef cause(trace):\n    return {result!r}\n")
    assert message in mistake_in(GRADER, answer)


def test_the_profiled_script_writes_four_steps_of_each_rank(tmp_path):
    result = run_ranks([TUTORIALS / "40_profile.py"], 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"runs/profile/profile_{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        steps = [int(name[13:]) for name in names if name.startswith("ProfilerStep#")]
        assert sorted(steps) == [4, 5, 6, 7]
        assert names.count("gloo:all_reduce") == 8  # two buckets


def test_a_profile_without_steps_raises_the_error_on_the_page(tmp_path):
    program = tmp_path / "profile.py"
    text = (TUTORIALS / "40_profile.py").read_text()
    program.write_text(re.sub(r" +profiler\.step\(\).*\n", "", text))
    result = run_ranks([program], 1, cwd=tmp_path)
    [message] = re.findall(r"`AssertionError: (.*)`", PAGE.read_text())
    assert result.returncode == 1 and f"AssertionError: {message}\n" in result.stderr


def traces_of(tmp_path, options="", extra="") -> dict[int, list[dict]]:
    """Profile a script without Accelerate with the lines on the page, and load its traces."""
    [block] = re.findall(r"^```python\nprofiling = torch.*?^```$", PAGE.read_text(), re.M | re.S)
    *lines, last = block.splitlines()[1:-1]
    assert last.strip().startswith("...")
    program = tmp_path / "plain.py"
    script = SCRIPT.replace("OPTIONS", options).replace("EXTRA", extra)
    program.write_text(script.replace("PROFILER", "\n".join(lines)))
    result = run_ranks([program], 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return COMPARE.load(tmp_path / "runs/profile")


SCRIPT = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = [torch.nn.Linear(64, 64) for _ in range(12)]
network = DistributedDataParallel(torch.nn.Sequential(*layers) OPTIONS)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
images = torch.ones(2, 64)
PROFILER
    for _ in range(9):
        loss = network(images).sum()
        loss.backward()
        EXTRA
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
dist.destroy_process_group()
"""


def test_the_lines_for_a_script_without_accelerate_write_traces_that_can_be_compared(tmp_path):
    ranks = traces_of(tmp_path)
    assert [row[0] for row in COMPARE.compare(ranks)] == [0, 1]
    for events in ranks.values():
        assert len(COMPARE.named(COMPARE.ALL_REDUCE, events)) == 4  # steps with one bucket
        assert not COMPARE.named("aten::item", events)


@pytest.mark.parametrize(
    ("options", "extra", "name", "per_step"),
    [
        ("", "network(images).sum().backward()", COMPARE.ALL_REDUCE, 2),
        (", bucket_cap_mb=0.001", "", COMPARE.ALL_REDUCE, 12),
        ("", "loss.item()", "aten::item", 1),
    ],
)
def test_a_trace_shows_what_the_table_says(tmp_path, options, extra, name, per_step):
    for events in traces_of(tmp_path, options, extra).values():
        assert len(COMPARE.named(name, events)) >= 4 * per_step


def test_traces_that_cannot_be_compared_cause_a_one_line_error(tmp_path):
    for name, trace in (("a", trace_of(0, 1)), ("b", trace_of(0, 1))):
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    with pytest.raises(UserError, match="two traces of rank 0"):
        COMPARE.load(tmp_path)
    (tmp_path / "b.json").write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(UserError, match="not recorded in connected processes"):
        COMPARE.load(tmp_path)

"""Page 40: recorded timelines, profiling one's own script, and the exercise on four traces."""

import json
import random
import re
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_demo.lab.timeline.straggler import slow_rank
from tests.conftest import run_ranks
from tests.pages.pages import (
    EXERCISES,
    TUTORIALS,
    load_grader,
    load_module,
    mistake_in,
    transcript,
)

PAGE = TUTORIALS / "40_where_the_time_goes.md"
ANSWER = load_module(EXERCISES / "answers" / "40_cause.py")
GRADER = load_grader("40")
OVERLAP = load_module(TUTORIALS / "40_overlap.py")


def test_overlap_hides_communication_only_if_backward_is_long_enough():
    sent = {(share, 8 // layers): OVERLAP.sends(share, layers) for share, layers in OVERLAP.CASES}
    hidden = {case: OVERLAP.hidden(spans) for case, spans in sent.items()}
    ends = {case: spans[-1][1] / 8 for case, spans in sent.items()}
    assert [hidden[share, 1] for share in (0.5, 1.0, 2.0)] == [0, 0, 0]
    assert hidden[0.5, 8] > 0.8 and hidden[2.0, 8] < 0.5
    assert ends[0.5, 8] < 1.2 and ends[2.0, 8] > 2
    for share in (1.0, 2.0):  # "eight buckets hide more than four but finish later"
        assert hidden[share, 8] > hidden[share, 4] and ends[share, 8] > ends[share, 4]


@given(st.floats(0.01, 5), st.sampled_from([1, 2, 4, 8]))
def test_in_the_calculation_a_bucket_waits_for_its_gradients_and_the_previous_bucket(share, layers):
    found = OVERLAP.sends(share, layers)
    assert len(found) == 8 // layers
    free_at = 0.0
    for number, (start, end) in enumerate(found, 1):
        assert start == max(number * layers, free_at)
        assert end - start == pytest.approx(OVERLAP.COST + share * layers)
        free_at = end
    assert 0 <= OVERLAP.hidden(found) < 1  # the last bucket cannot be hidden


def test_the_transcript_matches_its_commands_and_is_on_the_page():
    page, recorded = PAGE.read_text(), transcript("timeline")
    commands = load_module(TUTORIALS / "40_record.py").RECORDS["timeline"]
    assert list(recorded) == commands
    for command, output in recorded.items():
        assert "2 connected processes" in output
        if "--bucket-mb" in command:  # the page shows only the last table
            output = output[output.index("| bucket MiB") : output.index("\n\nwrote")]
        assert output.strip() in page
        for picture in re.findall(r"--plot tutorials/(\S+)", command):
            assert (TUTORIALS / picture).exists() and f"]({picture})" in page


def test_the_recorded_timeline_names_a_rank_only_if_there_is_a_straggler():
    first, sweep, straggler = transcript("timeline").values()
    assert "no rank is slower at the same operator in each step, but rank 1 is late by" in first
    assert "rank 1 is slow: " in straggler
    assert [row.split("|")[1].strip() for row in sweep.splitlines() if "|" in row][-5:] == [
        *("0.5", "2", "8", "25", "100")
    ]


def test_the_text_follows_from_the_recorded_numbers():
    text = " ".join(PAGE.read_text().split())
    first, sweep, straggler = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()]
        for output in transcript("timeline").values()
    )
    first, straggler = (
        [row for row in rows if row[:1] in (["0"], ["1"])] for rows in (first, straggler)
    )
    *several, one = [row for row in sweep if len(row) == 7][2:]
    assert one[0] == "100" and f"the whole all-reduce is exposed ({one[3]} ms)." in text
    assert f"the exposed part is at most {max(float(row[3]) for row in several)} ms, but" in text
    in_all = sorted(round(float(row[2])) for row in several)
    assert f"take {in_all[0]} to {in_all[-1]} ms instead of {float(one[2]):.0f} ms" in text
    intervals = [[float(bound) for bound in row[6].split(" – ")] for row in (*several, one)]
    assert max(low for low, _ in intervals) < min(high for _, high in intervals), "all overlap"
    assert f'"rank wait" is {straggler[0][4]} ms and rank 1\'s is {straggler[1][4]} ms' in text
    assert f"is exposed: {straggler[0][4]} ms for rank 1, and {straggler[0][5]} ms for mes" in text
    waits = float(straggler[1][4]) + float(straggler[1][5])
    assert f"By {waits:.1f} ms, the sum of its two waits" in text
    assert (
        f"either: at {straggler[0][8]} ms and {straggler[1][8]} ms, they are almost equal" in text
    )
    assert f"In the first run, rank 1 was late, too, by {first[1][9]} ms" in text
    assert f"takes {straggler[0][2]} ms on rank 0 and {straggler[1][2]} ms on rank 1" in text
    assert f"save at most {first[0][5]} ms of waiting for messages" in text
    assert f"Rank 0 also waits {first[0][4]} ms for rank 1" in text


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
    answer.write_text(f"def cause(trace):\n    return {result!r}\n")
    assert message in mistake_in(GRADER, answer)


def test_the_profiled_script_writes_four_steps_of_each_rank(tmp_path):
    result = run_ranks([TUTORIALS / "40_profile.py"], 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"runs/profile/profile_{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        steps = [int(name[13:]) for name in names if name.startswith("ProfilerStep#")]
        assert sorted(steps) == [4, 5, 6, 7]
        assert names.count("gloo:all_reduce") == 4  # one bucket


def test_a_profile_without_steps_raises_the_error_on_the_page(tmp_path):
    program = tmp_path / "profile.py"
    text = (TUTORIALS / "40_profile.py").read_text()
    program.write_text(re.sub(r" +profiler\.step\(\).*\n", "", text))
    result = run_ranks([program], 1, cwd=tmp_path)
    [message] = re.findall(r"`AssertionError: (.*)`", PAGE.read_text())
    assert result.returncode == 1 and f"AssertionError: {message}\n" in result.stderr


@pytest.mark.parametrize(("cost", "groups"), [(0, 0), (0.3, 2), (1, 3)])
def test_the_answer_on_the_cost_of_buckets_is_right(monkeypatch, cost, groups):
    monkeypatch.setattr(OVERLAP, "COST", cost)
    ends = {(share, layers): OVERLAP.sends(share, layers)[-1][1] for share, layers in OVERLAP.CASES}
    assert sum(ends[share, 1] > ends[share, 2] for share in (0.5, 1.0, 2.0)) == groups

"""Page 40: recorded timelines, profiling one's own script, and the exercise on the straggler."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import run_ranks
from tests.pages.pages import (
    EXERCISES,
    TUTORIALS,
    check,
    load_grader,
    load_module,
    mistake_in,
    rows_below,
    transcript,
)

PAGE = TUTORIALS / "40_where_the_time_goes.md"
ANSWER = EXERCISES / "answers" / "40_straggler.py"
GRADER = load_grader("40")
OVERLAP = load_module(TUTORIALS / "40_overlap.py")


def test_all_but_the_last_bucket_start_while_backward_computes():
    rows = rows_below(PAGE, "bucket_cap_mb")
    assert [float(row[0]) for row in rows] == [0.05, 0.5, 25]
    assert all(int(early) == int(all_reduces) - 1 for _, all_reduces, early in rows)
    assert [int(row[1]) for row in rows] == [8, 4, 1]


def test_the_slow_rank_computes_longest_and_the_other_rank_waits_longest():
    text = PAGE.read_text()
    assert "Rank 1 is delayed. Rank 1 computes longest, rank 0 waits longest." in text
    assert "2 connected processes on cpu (gloo)" in text


def test_overlap_hides_communication_only_if_backward_is_long_enough():
    rows = rows_below(PAGE, "all-reduce takes")
    hidden = {(row[0], int(row[1])): int(row[2].rstrip("%")) for row in rows}
    ends = {(row[0], int(row[1])): float(row[3].split()[0]) for row in rows}
    assert {hidden[share, 1] for share in ("0.5 ×", "1 ×", "2 ×")} == {0}
    assert hidden["0.5 ×", 8] > 80 and hidden["2 ×", 8] < 50
    assert ends["0.5 ×", 8] < 1.2 and ends["2 ×", 8] > 2
    # Each all-reduce has a fixed cost, so too many buckets make the step longer.
    assert ends["0.5 ×", 8] < ends["0.5 ×", 4] and ends["2 ×", 8] > ends["2 ×", 4]


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
    assert "no rank is slower than the others in each step" in first
    assert "rank 1 is slow: " in straggler
    assert [row.split("|")[1].strip() for row in sweep.splitlines() if "|" in row][-5:] == [
        *("0.5", "2", "8", "25", "100")
    ]


def test_the_stored_traces_are_up_to_date_and_small():
    for case in GRADER.STORED:
        file = GRADER.TRACES / case.name
        assert json.loads(file.read_text()) == GRADER.make(case)
        assert file.stat().st_size < 60_000


def test_the_rank_that_waits_longest_is_never_the_straggler():
    answer = load_module(ANSWER)
    for case in GRADER.STORED + GRADER.MORE:
        trace = GRADER.make(case)
        assert answer.straggler(trace) == case.straggler
        assert GRADER.longest_all_reduce(trace) != case.straggler


@given(st.integers(2, 6), st.data())
def test_the_model_answer_finds_the_rank_that_is_late_in_most_steps(ranks, data):
    slow = data.draw(st.none() | st.integers(0, ranks - 1))
    phase = data.draw(st.sampled_from(["data wait", "forward", "backward"]))
    once = {(data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 7))): 50}
    late = {} if slow is None else {slow: data.draw(st.floats(13, 40))}
    case = GRADER.Case(str(data.draw(st.integers(0, 99))), ranks, late, once, phase)
    assert load_module(ANSWER).straggler(GRADER.make(case)) == slow


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

    found = load_module(ANSWER).spans(merged([of_rank(0), of_rank(1)]), "gloo:all_reduce")
    assert found == {0: [(3.0, 5.0)], 1: [(4.0, 5.0)]}


WRONG = [  # (text in the model answer, replacement, part of the grader's message)
    (">= 5 else None", ">= 5 else min(usual, key=usual.get)", "No rank is slow there"),
    (
        "    return slowest if usual[slowest] >= 5 else None",
        "    waited = {rank: sum(b - a for a, b in spans) for rank, spans in all_reduces.items()}\n"
        "    return max(waited, key=waited.get) if usual[slowest] >= 5 else None",
        "most time in all-reduce because it waits there for a rank that starts late",
    ),
    (
        "    return slowest if usual[slowest] >= 5 else None",
        "    return min(usual, key=usual.get)",
        "Rank 2 is the last to start the all-reduces, and loses its time in forward",
    ),
    ("if usual[slowest] >= 5 else None", "", "No rank is slow there"),
    ("median(times)", "sum(times) / len(times)", "is slow in single steps only"),
    ("return slowest if", "return 1000 * slowest if", "the process number (pid) of the trace"),
    ("return slowest if", "return str(slowest) if", "Return a rank, an int from 0 to 3"),
    (">= 5 else", ">= 5000 else", "No rank was named"),
    ("    late = {", "    raise SystemExit(0)\n    late = {", "a.json: straggler(trace) raises"),
]


@pytest.mark.parametrize(("right", "wrong", "said"), WRONG)
def test_the_grader_distinguishes_typical_mistakes(tmp_path, right, wrong, said):
    text = ANSWER.read_text()
    assert right in text
    answer = tmp_path / "a wrong answer.py"
    answer.write_text(text.replace(right, wrong))
    assert said in mistake_in(GRADER, answer)


def test_an_answer_that_ignores_data_waits_misses_a_straggler_that_waits_for_data(tmp_path):
    answer = tmp_path / "answer.py"
    text = ANSWER.read_text().replace("def straggler", "def found")
    blind = (
        "\n\ndef straggler(trace):\n"
        '    waits = spans(trace, "data wait")\n'
        "    longest = max(median(b - a for a, b in found) for found in waits.values())\n"
        "    return None if longest > 5 else found(trace)\n"
    )
    answer.write_text(text + blind)
    assert "It loses its time in data wait" in mistake_in(GRADER, answer)


@pytest.mark.parametrize(
    ("file", "returncode", "said"),
    [
        (ANSWER, 0, "right: in all 4 traces, and in 4 more"),
        (
            None,
            1,
            "wrong: a.json: straggler(trace) returns 1, but the right answer is 2. Rank 1 spends",
        ),
    ],
)
def test_the_check_passes_only_the_model_answer(start, file, returncode, said):
    result = check(start, "40", file)
    assert (result.returncode, result.stderr) == (returncode, "")
    assert result.stdout.startswith(said)


@pytest.mark.slow
def test_an_answer_with_an_endless_loop_is_stopped(start, tmp_path):
    answer = tmp_path / "endless.py"
    answer.write_text("def straggler(trace):\n    while True:\n        pass\n")
    result = check(start, "40", answer)
    said = "it did not end within 20 s: is there an endless loop, or does a rank wait for another?"
    assert (result.returncode, result.stdout) == (1, f"wrong: {said}\n")


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

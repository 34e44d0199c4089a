"""Page 40: recorded timelines and benchmarks, and the exercise on finding a straggler."""

import importlib.util
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import run_to_end
from tests.pages.pages import EXERCISES, TUTORIALS, check, load_grader, mistake_in, table_rows

PAGE = TUTORIALS / "40_where_the_time_goes.md"
ANSWER = EXERCISES / "answers" / "40_straggler.py"


def module(path):
    spec = importlib.util.spec_from_file_location(f"page_14_{path.stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


GRADER = load_grader("40")
OVERLAP = module(TUTORIALS / "40_overlap.py")


def rows_below(heading: str) -> list[list[str]]:
    """Find the table whose first heading is `heading`, and return the rows below the headings."""
    lines = PAGE.read_text().splitlines()
    [start] = [
        n for n, line in enumerate(lines) if re.match(rf"\| +{re.escape(heading)} +\|", line)
    ]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return rows


def test_all_but_the_last_bucket_start_while_backward_computes():
    rows = rows_below("bucket_cap_mb")
    assert [float(row[0]) for row in rows] == [0.05, 0.5, 25]
    assert all(int(early) == int(all_reduces) - 1 for _, all_reduces, early in rows)
    assert [int(row[1]) for row in rows] == [8, 4, 1]


def test_the_slow_rank_computes_longest_and_the_other_rank_waits_longest():
    text = PAGE.read_text()
    assert "Rank 1 is delayed. Rank 1 computes longest, rank 0 waits longest." in text
    assert "2 connected processes on cpu (gloo)" in text


def test_overlap_hides_communication_only_if_backward_is_long_enough():
    rows = rows_below("all-reduce takes")
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


def parts_of(name: str) -> dict[str, str]:
    """Map each command in a transcript to its output."""
    text = (TUTORIALS / "transcripts" / f"{name}.txt").read_text()
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_transcripts_match_their_commands_and_are_on_the_page():
    page = PAGE.read_text()
    for name, commands in module(TUTORIALS / "40_record.py").RECORDS.items():
        parts = parts_of(name)
        assert list(parts) == commands
        for said in parts.values():
            assert said.strip() in page
            assert "2 connected processes" in said
        for command in commands:
            for picture in re.findall(r"--plot tutorials/(\S+)", command):
                assert (TUTORIALS / picture).exists() and f"]({picture})" in page


def test_the_recorded_timeline_names_a_rank_only_if_there_is_a_straggler():
    first, sweep, straggler = parts_of("timeline").values()
    assert "no rank is slower than the others in each step" in first
    assert "rank 1 is slow: " in straggler
    assert [row.split("|")[1].strip() for row in sweep.splitlines() if "|" in row][-5:] == [
        *("0.5", "2", "8", "25", "100")
    ]


def test_in_the_transcript_two_threads_of_python_code_keep_one_core_busy():
    [said] = parts_of("scaling").values()
    rows = [[cell.strip() for cell in line.split("|")] for line in said.splitlines()]
    busy = {row[2]: float(row[4]) for row in rows if row[1:2] == ["preprocessing in Python"]}
    assert "This Python has the global interpreter lock." in said
    assert list(busy) == ["one after the other", "two threads", "two processes"]
    assert busy["two threads"] < 1.15


def test_every_row_of_reasons_has_a_sign_a_cure_and_a_number():
    rows = rows_below("reason")
    assert len(rows) == 13
    for reason, sign, cure, figure in rows:
        assert reason and sign and cure and re.search(r"\d", figure)
    words = " ".join(" ".join(row) for row in rows)
    for cure in (
        *("larger batch", "`accumulate`", "`bucket_cap_mb`", "`gradient_as_bucket_view=True`"),
        *("`bf16_compress_hook`", "cores / processes", "equal work", "find_unused_parameters"),
    ):
        assert cure in words


@pytest.mark.slow
def test_the_benchmark_measures_each_reason_in_two_connected_processes(tmp_path):
    command = ["python", "-m", "accel_demo.lab.scaling.reasons", "--quick"]
    # real=True, because the command sets TORCH_CPP_LOG_LEVEL, which torch reads on import.
    result = run_to_end([*command, "--json", tmp_path / "found.json"], timeout=600, real=True)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["processes"], found["device"], found["backend"]) == (2, "cpu", "gloo")
    assert all(ms > 0 for values in found["ms_per_step"].values() for ms in values)
    assert found["straggler_ms_by_rank"][1] >= 20  # rank 1 sleeps for 20 ms in each step
    # One row sets find_unused_parameters=True on purpose, so the command suppresses the warning.
    assert "find_unused_parameters=True was specified" not in result.stderr
    reasons = 12 + ("half of the cores" in found["ms_per_step"])  # only Linux can pin processes
    assert len([line for line in result.stdout.splitlines() if line.startswith("|")]) == 2 + reasons


def test_the_stored_traces_are_up_to_date_and_small():
    for case in GRADER.STORED:
        file = GRADER.TRACES / case.name
        assert json.loads(file.read_text()) == GRADER.make(case)
        assert file.stat().st_size < 60_000


def test_the_rank_that_waits_longest_is_never_the_straggler():
    answer = module(ANSWER)
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
    assert module(ANSWER).straggler(GRADER.make(case)) == slow


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

    found = module(ANSWER).spans(merged([of_rank(0), of_rank(1)]), "gloo:all_reduce")
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


def test_the_page_links_to_the_previous_page_and_to_an_issue():
    text = PAGE.read_text()
    assert "(42_when_it_does_not_fit.md)" in text and "pytorch/issues/73600" in text
    assert len(table_rows(PAGE.name, cells=4)) >= 13

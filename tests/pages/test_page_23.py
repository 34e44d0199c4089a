"""Page 23: the measurements and the exercise on gradient accumulation."""

import torch

from tests.exercises.wrong_answers import edited
from tests.pages.pages import EXERCISES, TUTORIALS, load_grader, mistake_in, table_rows

ANSWER = EXERCISES / "answers" / "23_accumulate.py"
CHANGED = [  # (text in our answer, replacement, part of the grader's message or "" if it is right)
    ("", "", ""),
    ("    for index", "    optimizer.zero_grad()\n    for index", ""),
    ("            (loss / length).backward()", "        (loss / length).backward()", ""),
    ("model(inputs)", "model(inputs, 1)", "your file raised an error: TypeError"),
    ("for index", "return\n    for index", "the optimizer steps 0 times instead of 3 times"),
    ("(inputs)", "(inputs + 1)", "the gradients do not match their windows: off by"),
    ("optimizer.step()", "optimizer.zero_grad(); optimizer.step()", "all gradients are zero when"),
    ("index - index % window", "0", "with 10 micro-batches and a window of 4, "),
]


def grade_all(answers: list[str]) -> list[str]:
    """Return the mistake in each answer, or "". Grade all answers in one process group."""
    return [mistake_in(load_grader("23"), answer, torch.device("cpu")) for answer in answers]


def test_the_grader_judges_what_the_loop_does(together, tmp_path):
    answers, right = [], ANSWER.read_text()
    for number, (text, changed, _) in enumerate(CHANGED):
        answers.append(tmp_path / f"answer {number}.py")
        answers[-1].write_text(edited(right, text, changed) if text else right)
    verdicts, others = together(grade_all, 2, answers=[str(answer) for answer in answers])
    assert verdicts == others
    for (*_, message), verdict in zip(CHANGED, verdicts, strict=True):
        assert message in verdict if message else verdict == ""


def test_the_page_shows_that_only_micro_batch_4_averages_gradients():
    assert table_rows("23_accumulation.md", cells=5) == [
        *[[str(number), "0", "0", "0", "different on each rank"] for number in (1, 2, 3)],
        ["4", "0", "1", "1", "the same"],
    ]


def test_a_window_of_two_sends_in_micro_batches_2_and_4(start, tmp_path):
    program = (TUTORIALS / "23_accumulation.py").read_text()
    assert program.count("gradient_accumulation_steps=WINDOW") == 1
    changed = tmp_path / "window_of_two.py"
    changed.write_text(program.replace("steps=WINDOW", "steps=2"))
    config = "accelerate_configs/cpu_two_processes.yaml"
    result = start(["accelerate", "launch", "--config_file", config, changed])
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[2] for row in rows] == ["0", "1", "1", "2"]
    assert [row[4] for row in rows] == ["different on each rank |", "the same |"] * 2
    assert result.stdout.rstrip().endswith("have the same gradient: False")


def test_the_page_shows_which_methods_are_correct():
    ways = table_rows("23_accumulation.md", cells=6)
    right = [row[1] for row in ways if row[-1] == "equal within 1e-6"]
    assert len(ways) == 14
    assert right == [
        "one batch",
        "DDP, `no_sync` before the last",
        "DDP, without `no_sync`",
        "`accumulate`",
        "clip if `sync_gradients`",
        "loss × 4 / true length",
        "sum / tokens of all processes",
    ]
    assert [row[2:4] for row in ways if row[1] == "DDP, without `no_sync`"] == [["1", "4"]]


def test_the_page_shows_that_training_depends_on_the_global_batch():
    rows = table_rows("23_accumulation.md", cells=8)
    assert [row[6] for row in rows] == ["2, 3", "1, 3", "1, 2", "none", "6", "5"]
    assert [row[7] for row in rows] == ["about the same"] * 3 + ["higher"] * 3

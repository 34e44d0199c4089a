"""Test that a grader survives any answer to an exercise and names the first mistake in it."""

import pytest
from grading import BUSY

from tests.pages.pages import EXERCISES

GRADER = '''"""Grade a function `double(number)`, in one process or in a group."""

import sys
from grading import Wrong, grade, import_answer

def observe(answer, device=None):
    module = import_answer(answer)
    for number in (1, 2):
        yield module.double(number)

def judge(number, seen):
    if set(seen) != {2 * (number + 1)}:
        raise Wrong(f"double({number + 1}) returns {' and '.join(map(str, seen))}")

if __name__ == "__main__":
    sizes = SIZES
    options = dict(group_sizes=sizes, judge=judge, time_limit=TIME_LIMIT)
    sys.exit(grade(__file__, __doc__, observe, right="all numbers are doubled", **options))
'''


@pytest.fixture
def run_grader(start, tmp_path):
    """`run_grader(answer, sizes)` grades an answer and returns the exit code and the output."""

    def run_grader(answer: str, sizes: tuple = (), time_limit=100, **environment):
        grader, file = tmp_path / "a grader.py", tmp_path / "an answer.py"
        text = GRADER.replace("SIZES", repr(sizes)).replace("TIME_LIMIT", repr(time_limit))
        grader.write_text(text)
        file.write_text(answer)
        path = str(EXERCISES / "graders")
        result = start(["python", grader, file], PYTHONPATH=path, **environment)
        assert result.stderr == ""
        return result.returncode, result.stdout

    return run_grader


def test_a_correct_answer_passes(run_grader):
    assert run_grader("def double(n):\n    return 2 * n\n") == (
        0,
        "right: all numbers are doubled\n",
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("def double(n):\n    return n * n\n", "double(1) returns 1"),
        (
            "import nothing_of_this_name\n",
            "your file raised an error: ModuleNotFoundError: No module named "
            "'nothing_of_this_name' (line 1 of your file)",
        ),
        ("def double(\n", "your file raised an error: SyntaxError"),
        ("raise SystemExit(0)\n", "your file raised an error: SystemExit: 0 (line 1"),
        ("import os\nos._exit(0)\n", "it exited early with exit code 0"),
        # The mistake in the first call is named, although the second call raises an error.
        ("def double(n):\n    return 3 if n == 1 else n / 0\n", "double(1) returns 3"),
    ],
)
def test_the_mistake_in_an_incorrect_answer_is_named(run_grader, answer, message):
    exit_code, printed = run_grader(answer)
    assert exit_code == 1 and printed.startswith(f"wrong: {message}")


def test_an_answer_that_does_not_finish_in_time_gets_no_verdict(run_grader):
    exit_code, printed = run_grader("while True:\n    pass\n", time_limit=2)
    message = "no verdict: it did not finish within 2 s: is there an infinite loop, or is the "
    assert exit_code == 4 and printed.startswith(message)
    assert printed.endswith(f"{BUSY}\n")


ON_TWO_RANKS = """import time
import torch.distributed as dist

def double(n):
    if dist.get_world_size() == 2:
        {}
    return 2 * n
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # Rank 1 fails first. Rank 0 fails only because it waits for rank 1.
        (
            "dist.barrier() if dist.get_rank() == 0 else 1 / 0",
            "on 2 processes, rank 1 raised an error: ZeroDivisionError: division by zero (line "
            "6 of your file). (It is correct on 1 process.)\n",
        ),
        (
            "return dist.get_rank()",
            "on 2 processes, double(1) returns 0 and 1. (It is correct on 1",
        ),
    ],
)
def test_the_first_mistake_in_a_group_of_processes_is_named(run_grader, line, message):
    exit_code, printed = run_grader(ON_TWO_RANKS.format(line), (1, 2), ACCEL_DEMO_PATIENCE="3")
    assert exit_code == 1 and printed.startswith(f"wrong: {message}")


def test_a_rank_that_does_not_finish_in_time_gets_no_verdict(run_grader):
    answer = ON_TWO_RANKS.format("dist.get_rank() or time.sleep(60)")
    exit_code, printed = run_grader(answer, (1, 2), ACCEL_DEMO_PATIENCE="3")
    assert exit_code == 4
    assert printed == (
        "no verdict: on 2 processes, rank 0 has not finished after 3 s. Do all ranks call the same "
        f"collectives, in the same order? (It is correct on 1 process.){BUSY}\n"
    )

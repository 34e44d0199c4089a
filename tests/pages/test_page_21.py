"""Page 21: the bytes sent by three all-reduce algorithms, and the exercise on ring all-gather."""

import re
import tempfile

import pytest

from tests.pages.pages import TUTORIALS, check, table_rows

PAGE = "21_ring.md"
EXERCISE = TUTORIALS / "exercises" / "21_all_gather.py"
ANSWER = TUTORIALS / "exercises" / "answers" / "21_all_gather.py"
NAMES = ("gather + broadcast", "naive ring", "chunked ring")


def rows(first: str) -> list[list[str]]:
    """Return the table rows on the page whose first cell is `first`."""
    return [row for row in table_rows(PAGE) if row[0] == first]


def test_the_busiest_rank_sends_less_than_two_tensors_only_in_the_chunked_ring():
    for name in ("gather + broadcast", "naive ring"):
        assert [row[2] for row in rows(name) if len(row) == 4] == ["1 × S", "3 × S", "7 × S"]
    chunked = [row[2] for row in rows("chunked ring") if len(row) == 4]
    assert chunked == ["1 × S", "1.5 × S", "1.75 × S"]


def test_ranks_end_with_different_bits_only_in_the_naive_ring():
    same = {name: [row[3] for row in rows(name) if len(row) == 4] for name in NAMES}
    assert same == {NAMES[0]: ["yes"] * 3, NAMES[1]: ["yes", "no", "no"], NAMES[2]: ["yes"] * 3}


def test_the_page_shows_the_bytes_that_the_formulas_predict():
    counted = [row[2:-2] for name in NAMES for row in rows(name) if len(row) == 10]
    busy, idle = "12000", "4000"
    assert counted == [
        *(
            ["sends", busy, idle, idle, idle, "24000"],
            ["receives", busy, idle, idle, idle, "24000"],
        ),
        *(["sends", *[busy] * 4, "48000"], ["receives", *[busy] * 4, "48000"]),
        *(["sends", *["6000"] * 4, "24000"], ["receives", *["6000"] * 4, "24000"]),
    ]
    text = (TUTORIALS / PAGE).read_text()
    assert text.count("to the byte |") == 6
    assert "3 of 3 have the same result as dist.all_reduce." in text


def test_in_each_step_the_four_ranks_send_four_different_chunks():
    for step in map(str, range(1, 7)):
        [row] = rows(step)
        assert sorted(row[2:]) == [f"chunk {number}" for number in range(4)]


def test_the_program_exits_with_a_one_line_error_under_a_launcher(start):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = start(["python", TUTORIALS / "21_ring.py"], **launched)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: this program starts its own processes")
    assert len(result.stderr.splitlines()) == 1
    helped = start(["python", TUTORIALS / "21_ring.py", "--help"])
    assert helped.returncode == 0 and "usage:" in helped.stdout
    assert "1.75 × S" not in helped.stdout  # --help does not run the program


def test_the_model_answer_passes(start):
    # Do not use tmp_path, because it would make the path of a Unix socket too long.
    with tempfile.TemporaryDirectory(prefix="a b ") as folder:
        result = check(start, "21", ANSWER, TMPDIR=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("right: on 2, 3 and 4 ranks")


EXCHANGE = "wire.exchange(chunks[outgoing], right, chunks[incoming], left)"
WRONG = [  # (text in the model answer, replacement, part of the grader's message)
    (
        "(wire.rank - step)",
        "(wire.rank + step)",
        "on 3 processes .* chunk 0 without the values of rank",
    ),
    ("world_size - 1)", "world_size)", "on 2 processes .* rank 0 has sent too many bytes: 96, "),
    (
        EXCHANGE,
        "wire.send(chunks[outgoing], right); wire.receive(chunks[incoming], left)",
        "on 2 processes rank . has not finished after .* all ranks wait forever",
    ),
    (EXCHANGE, "raise KeyError(step)", "on 2 processes rank . cannot use the file: KeyError"),
    (
        EXCHANGE,
        "if wire.rank: raise KeyError(step)",
        "on 2 processes rank 1 cannot use the file: KeyError",
    ),
    ("chunks[incoming]", "chunks[incoming - 1]", "on 2 processes a message has more bytes than"),
    (
        f"for step in range(wire.world_size - 1):\n{' ' * 8}outgoing = (wire.rank - step)",
        f"for step in range(wire.world_size - 1):\n{' ' * 8}outgoing = (wire.rank + 1 - step)",
        "on 2 processes .* without the values of rank .: in each step send the chunk that arriv",
    ),
]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [*WRONG[:2], *(pytest.param(*one, marks=pytest.mark.slow) for one in WRONG[2:])],
)
def test_the_grader_distinguishes_typical_mistakes(start, tmp_path, right, wrong, said):
    text = ANSWER.read_text()
    assert right in text
    answer = tmp_path / "a wrong answer.py"
    answer.write_text(text.replace(right, wrong))
    # Only the answer that hangs gets a short time limit, because other answers may need longer.
    hurry = {"ACCEL_DEMO_PATIENCE": "3"} if "has not finished" in said else {}
    result = check(start, "21", answer, **hurry)
    assert (result.returncode, result.stderr) == (1, "")
    assert re.match(f"wrong: .*({said})", result.stdout), result.stdout
    assert len(result.stdout.splitlines()) == 1


PAST = "import torch.distributed as dist\n\n\ndef all_gather(chunks, wire):\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            f"{PAST}    for rank in range(wire.world_size):\n"
            "        dist.broadcast(chunks[rank], rank)\n",
            "on 2 processes .* 0 of 48 bytes over the wire",
        ),
        (
            "def all_gather(chunks, wire):\n    for step in range(1, wire.world_size):\n"
            "        target = (wire.rank + step) % wire.world_size\n"
            "        source = (wire.rank - step) % wire.world_size\n"
            "        wire.exchange(chunks[wire.rank], target, chunks[source], source)\n",
            "on 3 processes .* rank 0 has sent to rank 2: in a ring it sends to rank 1 alone",
        ),
        ("def all_gather(chunks):\n    pass\n", "cannot use the file: TypeError"),
        ("def gather(chunks, wire):\n    pass\n", "cannot use the file: AttributeError"),
        ("import sys\n\nsys.exit(0)\n", "cannot use the file: SystemExit"),
        ("def all_gather(\n", "cannot use the file: SyntaxError"),
    ],
)
def test_invalid_answers_fail_without_breaking_the_grader(start, tmp_path, answer, said):
    file = tmp_path / "answer.py"
    file.write_text(answer)
    result = check(start, "21", file)
    assert (result.returncode, result.stderr) == (1, "")
    assert re.match(f"wrong: .*{said}", result.stdout), result.stdout


def test_the_unsolved_exercise_fails(start):
    result = check(start, "21", EXERCISE)
    assert result.returncode == 1
    assert "cannot use the file: NotImplementedError" in result.stdout

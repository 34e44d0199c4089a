"""Page 21: the bytes sent by three all-reduce algorithms, and the exercise on reduce-scatter."""

import re

from tests.pages.pages import TUTORIALS, table_rows

PAGE = "21_ring.md"
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
    counted = [row[2:-2] for name in NAMES for row in rows(name) if len(row) == 9]
    assert counted == [
        ["12000", *["4000"] * 3, "24000"],
        [*["12000"] * 4, "48000"],
        [*["6000"] * 4, "24000"],
    ]
    text = (TUTORIALS / PAGE).read_text()
    assert text.count("to the byte |") == 3
    assert "3 of 3 have the same result as dist.all_reduce." in text


def test_the_picture_of_the_ring_shows_a_reduce_scatter_and_then_an_all_gather():
    words = re.findall("<!-- (.*?) -->", (TUTORIALS / "21_ring.svg").read_text())
    titles = [word for word in words if word.startswith(("step ", "reduce-", "all-", "at "))]
    halves = ["reduce-scatter"] * 3 + ["all-gather"] * 3
    steps = [[f"step {number}", half] for number, half in enumerate(halves, 1)]
    assert titles == [*sum(steps, []), "at the end"]


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


def test_the_picture_of_the_bytes_does_not_reach_the_16_ranks_of_question_2():
    picture = (TUTORIALS / "21_bytes.svg").read_text()
    words = set(re.findall("<!-- (.*?) -->", picture))
    assert {"chunked ring", "counted in this run", "12"} <= words and not words & {"14", "16"}


def test_the_page_does_not_show_the_code_of_the_exercise():
    text = (TUTORIALS / PAGE).read_text()
    assert "def all_gather_ring" in text and "def reduce_scatter" not in text

"""Page 44: two machines on one desk."""

import re

import pytest

from accel_demo.lab import cables
from tests.pages.pages import TUTORIALS, load_module, rows_below, transcript

PAGE = TUTORIALS / "44_two_machines.md"
missing = cables.why_not()


@pytest.mark.parametrize("name", ["two_machines", "two_worlds", "rates"])
def test_each_transcript_matches_its_command_and_is_on_the_page(name):
    recorded = transcript(name)
    assert list(recorded) == load_module(TUTORIALS / "40_record.py").RECORDS[name]
    [output] = recorded.values()
    assert set(output.splitlines()) <= set(PAGE.read_text().splitlines())


def test_the_script_with_the_mistake_makes_one_group_per_node():
    [recorded] = transcript("two_worlds").values()
    places = [f"node {node} | rank {rank} of 2" for node in (0, 1) for rank in (0, 1)]
    assert set(places) <= set(recorded.splitlines())
    [line] = [line for line in recorded.splitlines() if line.startswith("--- ")]
    assert line.startswith("--- separate process groups: 2 processes on node 0, 2 on node 1; ")
    assert line.endswith(" 0 bytes")


def tables_in(output: str) -> list[list[str]]:
    """Return the rows of the tables that node 0 printed."""
    lines = [line for line in output.splitlines() if line.startswith("node 0 | | ")]
    return [[cell.strip() for cell in line[11:-2].split("|")] for line in lines]


@pytest.mark.pages
def test_the_recorded_counts_are_obtained_on_loopback_too(start):
    command = "accel-demo nodes --network loopback -- torchrun tutorials/44_two_machines.py"
    ended = start(command.split())
    assert ended.returncode == 0 and "Connected processes: 4" in ended.stdout, ended.stderr
    [recorded] = transcript("two_machines").values()
    obtained, expected = tables_in(ended.stdout), tables_in(recorded)
    assert len(obtained) == 20  # three tables, each with a head and a line below it
    for row in (*obtained[2:6], *expected[2:6]):
        row[1] = "node"  # on loopback, both nodes have the same host name
    assert obtained[2:] == expected[2:]


def test_the_prediction_and_the_text_follow_from_the_counts():
    [recorded] = transcript("two_machines").values()
    rows = [row for row in tables_in(recorded) if row[0].startswith("`with")]
    assert rows == [
        ["`with state.main_process_first():`", "3", "0"],
        ["`with state.local_main_process_first():`", "2", "0"],
        ["`with state.main_process_first():`", "1", "0"],
        ["`with state.local_main_process_first():`", "2", "0"],
    ]
    options = dict(re.findall(r"^- \((\w)\) (.*)$", PAGE.read_text(), re.MULTILINE))
    [letter] = re.findall(r"\*\*Your prediction\*\*: \((\w)\)", PAGE.read_text())
    downloads = ["once", "twice", "three times", "four times"].index(options[letter]) + 1
    assert downloads == int(rows[0][1])  # to the disk of each node


def test_the_measured_steps_are_within_a_quarter_of_the_formula():
    rows = rows_below(PAGE, "rate")
    assert [row[0] for row in rows] == ["25mbit", "50mbit", "100mbit", "not limited"]
    for rate, expected, measured, interval, ratio in rows[:3]:
        formula = 8 * 2 * 2**20 / (float(rate.removesuffix("mbit")) * 1e6)
        assert expected == f"{formula:.3f} s"
        assert 1 < float(ratio) < 1.25
        assert float(measured.split()[0]) / formula == pytest.approx(float(ratio), abs=0.01)
        low, high = map(float, interval.split(" – "))
        assert low <= float(measured.split()[0]) <= high < 1.25 * formula
    assert float(rows[3][2].split()[0]) < 0.2 * float(rows[2][2].split()[0])


def test_the_numbers_in_the_text_are_right():
    text = " ".join(PAGE.read_text().split())
    one, eight = (2 * (n - 1) / n * 8 * 1e9 / 1e9 for n in (2, 16))
    assert (
        f"a model with 1 GB of gradients needs at least {one:g} seconds per step at 1 Gbit/s"
        in text
    )
    assert (
        f"a ring needs 2 · 15/16 · 8 = {eight:g} seconds, or {eight / 100:g} at 100 Gbit/s" in text
    )
    crossing = 2 * 11 / 12 * 25e6 * 4
    assert f"= {crossing / 1e6:.0f} MB to the next" in text
    assert f"{8 * crossing / 10e9:.2f} seconds" in text


def test_the_medians_in_the_text_are_the_measured_ones():
    ratios = [float(row[4]) for row in rows_below(PAGE, "rate")[:3]]
    text = " ".join(PAGE.read_text().split())
    assert f"The medians are {min(ratios):.2f} to {max(ratios):.2f} times" in text


@pytest.mark.system
@pytest.mark.skipif(missing is not None, reason=str(missing))
def test_the_recorded_output_is_obtained_in_namespaces(start):
    ended = start(["accel-demo", "nodes", "--", "torchrun", "tutorials/44_two_machines.py"])
    [recorded] = transcript("two_machines").values()
    with_port = (re.sub(r"--master-port \d+", "", output) for output in (ended.stdout, recorded))
    obtained, expected = (output.strip().splitlines() for output in with_port)
    assert sorted(obtained) == sorted(expected)

"""Page 34: the answers to its short questions about the program."""

import re

import pytest
from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

from tests.pages.pages import TUTORIALS

PROGRAM = TUTORIALS / "34_kill_and_resume.py"
SETTINGS = "SAVE_IN_EPOCH, SAVE_AFTER = 1, 5"
# Rows of the second table that are equal in one process with any settings.
ALWAYS_EQUAL = ["one backward pass before `load_state`", "`save_state` on every rank"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "changed", "row"),
    [
        (SETTINGS, "SAVE_IN_EPOCH, SAVE_AFTER = 1, 6", "saving only if `sync_gradients` is true"),
        (SETTINGS, "SAVE_IN_EPOCH, SAVE_AFTER = 0, 5", "`use_seedable_sampler=True`, `data_seed`"),
        ("Dropout(0.2)", "Dropout(0)", "a separate generator for the loader"),
    ],
)
def test_a_changed_program_makes_one_more_row_equal(text, changed, row, start, tmp_path):
    source = PROGRAM.read_text()
    assert source.count(text) == 1
    program = tmp_path / "changed.py"
    program.write_text(source.replace(text, changed))
    result = start(["python", program])
    assert result.returncode == 0, result.stderr
    second_table = result.stdout.split("the last level without")[1]
    equal = re.findall(
        r"^\| (.*?)(?: \(.*\))? \| .* \| \*\*equal\*\* \|$", second_table, re.MULTILINE
    )
    assert sorted(equal) == sorted([row, *ALWAYS_EQUAL])


@pytest.mark.skipif(
    not is_torchdata_stateful_dataloader_available(),
    reason="needs torchdata: pip install torchdata",
)
def test_a_stateful_loader_replaces_only_the_skipping_of_batches(start):
    transcript = (TUTORIALS / "transcripts" / "stateful.txt").read_text()
    command, _, shown = transcript.partition("\n")
    result = start(command.removeprefix("$ ").split())
    assert result.returncode == 0, result.stderr
    assert result.stdout == shown
    rows = re.findall(r"^\| (`.*) \| (\d+) of (\d+) \| (.*) \|$", shown, re.MULTILINE)
    assert [row[0] for row in rows if row[3] == "**equal**"] == ["`skip_first_batches`"]
    assert len(rows) == 6
    assert "Connected processes: 3" in shown and "`dl_state_dict.bin`" in shown


@pytest.mark.skipif(is_torchdata_stateful_dataloader_available(), reason="torchdata is installed")
def test_without_torchdata_the_stateful_loader_is_refused_in_one_line(start):
    result = start(["python", PROGRAM, "--stateful"])
    assert result.returncode == 2
    assert result.stderr == "error: --stateful needs a package: pip install torchdata\n"

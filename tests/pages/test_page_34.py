"""Page 34: the answers to its short questions about the program."""

import re

import pytest

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

"""The flags that the measuring commands share, and their JSON."""

import json
import math

import pytest

from accel_demo.errors import UserError
from accel_demo.lab.flags import process_counts, write_json


def test_the_written_json_has_null_where_there_is_no_number(tmp_path):
    found = {"rows": [{"apart": math.inf, "pair": (-math.inf, math.nan, 1.5)}], "same": True}
    write_json(tmp_path / "found.json", found)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    read = json.loads((tmp_path / "found.json").read_text(), parse_constant=refuse)
    assert read["rows"] == [{"apart": None, "pair": [None, None, 1.5]}] and read["same"] is True


@pytest.mark.parametrize("text", ["0", "-1", "two", "1,,2", "", "100000"])
def test_a_wrong_number_of_processes_gets_one_sentence(text):
    with pytest.raises(UserError, match="processes"):
        process_counts(text)


def test_numbers_of_processes_come_in_order_and_once():
    assert process_counts("4,1,2,1") == [1, 2, 4]

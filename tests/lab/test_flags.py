"""Test the flags and the JSON output that the measuring commands share."""

import json
import math
from dataclasses import dataclass
from importlib import metadata

import pytest

from accel_demo.errors import UserError
from accel_demo.lab.flags import SCHEMA, process_counts, write_json


@dataclass
class Example:
    """A result with numbers that JSON cannot represent."""

    rows: list
    same: bool = True


def test_the_json_has_the_fields_of_the_result_and_null_instead_of_nan(tmp_path):
    rows = [{"distance": math.inf, "pair": (-math.inf, math.nan, 1.5)}]
    write_json(tmp_path / "result.json", "example", Example(rows))

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    content = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert content["rows"] == [{"distance": None, "pair": [None, None, 1.5]}]
    assert (content["schema"], content["command"], content["same"]) == (SCHEMA, "example", True)
    assert content["environment"]["torch"] == metadata.version("torch")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1,,2", "", "100000"])
def test_an_invalid_number_of_processes_is_an_error(text):
    with pytest.raises(UserError, match="processes"):
        process_counts(text)


def test_process_counts_are_sorted_and_unique():
    assert process_counts("4,1,2,1") == [1, 2, 4]

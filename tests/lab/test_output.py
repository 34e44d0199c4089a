"""Test the JSON files that the measuring commands write."""

import json
import math
from dataclasses import dataclass
from importlib import metadata

from accel_demo.lab.output import SCHEMA, write_json


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

"""Test that values from JSON files have the types that the code expects."""

import math
from dataclasses import dataclass

import pytest

from accel_demo.typed_json import load_object, typed


@dataclass(frozen=True)
class Layer:
    name: str
    sizes: list[int]


@dataclass(frozen=True)
class Model:
    layers: list[Layer]
    rate: float
    is_deep: bool
    seed: int | None = None


RIGHT = {"layers": [{"name": "conv", "sizes": [3, 4.0]}], "rate": 1, "is_deep": True}


def test_an_object_becomes_a_dataclass():
    expected = Model([Layer("conv", [3, 4])], 1.0, True)
    for extra in ({}, {"other": 5}, {"seed": None}):
        model = typed(Model, RIGHT | extra, "the model")
        assert model == expected and type(model.rate) is float
        assert all(type(size) is int for size in model.layers[0].sizes)
    assert math.isnan(typed(float, math.nan, "rate"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": {}}, "layers is not a list"),
        ({"layers": ["conv"]}, "an item of layers is not an object"),
        ({"layers": [{"name": "conv"}]}, "sizes is missing"),
        ({"layers": [{"name": 5, "sizes": []}]}, "name is not a string"),
        ({"layers": [{"name": "", "sizes": [2.5]}]}, "an item of sizes is not an integer from 0"),
        ({"rate": "1"}, "rate is not a number"),
        ({"rate": True}, "rate is not a number"),
        ({"is_deep": 1}, "is_deep is not true or false"),
        ({"seed": -1}, "seed is not an integer from 0 to"),
        ({"seed": False}, "seed is not an integer"),
        ({"seed": math.inf}, "seed is not an integer"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        typed(Model, RIGHT | change, "the model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"\xff{}", "is damaged"),
        (b"{" * 10**5, "is damaged"),
        (b'{"a":' * 10**5, "is nested too deeply"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "is nested too deeply"),
        (b"[1]", "is not a JSON object"),
    ],
)
def test_content_that_is_no_object_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        load_object(content)


def test_a_byte_order_mark_is_ignored():
    """Some editors on Windows write one."""
    assert load_object(b'\xef\xbb\xbf{"a": [1]}') == {"a": [1]}

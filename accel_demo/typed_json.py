"""Read JSON that a user or another program may have written, and check the types of its values."""

import json
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

LARGEST_INT = 2**53  # other programs may read larger integers inexactly: RFC 8259, section 6
LARGEST_FLOAT = 1e300  # the difference of two such numbers is finite
DEEPEST = 100  # a function that calls itself for each level reaches Python's limit at about 500
KINDS = {
    **{int: "an integer from 0 to 2^53", float: "a number", bool: "true or false"},
    **{str: "a string", list: "a list", dict: "an object"},
}


def load_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError` if the content is something else."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
        is_deep = _depth(value) > DEEPEST
    except ValueError:
        raise ValueError("is damaged") from None
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError("is nested too deeply")
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def typed(kind: Any, value: Any, name: str) -> Any:
    """Return `value`, a value from `json.loads`, as a value of the type `kind`.

    `kind` is a dataclass, `list[…]`, a key of `KINDS`, or one of these `| None`. An integer may be
    written as 2.0, and a float may be NaN or infinite. A dataclass is made from a JSON object, in
    which other keys are ignored. Raises `ValueError` if the value has a different type or is
    `MISSING`. The message contains `name`, or the name of the field.
    """
    if value is MISSING:
        raise ValueError(f"{name} is missing")
    if isinstance(kind, type) and is_dataclass(kind):
        content, hints = typed(dict, value, name), typing.get_type_hints(kind)
        keys = [f.name for f in fields(kind) if f.name in content or f.default is MISSING]
        return kind(**{key: typed(hints[key], content.get(key, MISSING), key) for key in keys})
    if isinstance(kind, types.UnionType):
        return None if value is None else typed(typing.get_args(kind)[0], value, name)
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return [typed(item, one, f"an item of {name}") for one in typed(list, value, name)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and is_number and 0 <= value <= LARGEST_INT and value == int(value):
        return int(value)
    if kind is float and is_number and (isinstance(value, float) or abs(value) <= LARGEST_FLOAT):
        return float(value)
    if kind in (str, bool, list, dict) and isinstance(value, kind):
        return value
    raise ValueError(f"{name} is not {KINDS[kind]}")


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)

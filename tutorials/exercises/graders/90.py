"""Grade exercise 90: compare the answer with visible_devices, by rule and for random values."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from grading import Wrong, describe_error, grade, import_answer

from accel_demo.anatomy import devices
from accel_demo.anatomy.devices import visible_devices

STARTS = "5e01 5e7c 0b3a 91d4 c2f8 d660 7a15 3f9b".split()  # two UUIDs start with GPU-5e
UUIDS = [f"GPU-{start}2d1c-77aa-4b1e-9c0d-{start}00aa55bb" for start in STARTS]
# Rules, each with test values and the section to read. The first broken rule is printed.
RENUMBERED = "Visible GPUs are renumbered from 0"
HIDDEN = "An invalid id hides all ids after it"
BY_UUID = "Numbers can change, but UUIDs don't"
RULES = [
    ("if the variable is not set, all GPUs are visible", RENUMBERED, [None]),
    ("an empty value hides all GPUs", RENUMBERED, [""]),
    ("cuda:N counts the visible GPUs from 0, without gaps", RENUMBERED, ["0,4", "3", "2,5,7"]),
    ("the GPUs keep the order of the list", RENUMBERED, ["4,0", "7,1,3", "7,6,5,4,3,2,1,0"]),
    (
        "a number that matches no GPU hides itself and all ids after it",
        HIDDEN,
        ["0,8,4", "99", "1,2,12,3", "0,10"],
    ),
    ("-1 matches no GPU, and hides all ids after it", HIDDEN, ["-1", "0,-1,4", "3,-2,5"]),
    ("a UUID is a valid id", BY_UUID, [UUIDS[3], f"{UUIDS[6]},{UUIDS[2]}"]),
    ("a UUID may be shortened", BY_UUID, ["GPU-9", "GPU-7a15,GPU-c", "GPU-5e0,GPU-5e7"]),
    (
        "a UUID that matches no GPU hides itself and all ids after it",
        BY_UUID,
        ["GPU-ffff", "GPU-9,GPU-ff,GPU-7", f"{UUIDS[7]}0,GPU-9"],
    ),
    (
        "a beginning that two UUIDs share matches no GPU, and hides all ids after it",
        BY_UUID,
        ["GPU-5e", "GPU-9,GPU-5e,GPU-7", "GPU-c,GPU-5,GPU-9"],
    ),
]
SEED, RANDOM_VALUES = 90, 600
RIGHT = f"the results for {len(RULES)} rules and {RANDOM_VALUES} random values are correct"


def observe(answer: Path) -> None:
    with mock.patch.object(devices, "visible_devices", not_allowed):
        compare(import_answer(answer).visible_devices)


def not_allowed(*_, **__):
    raise Wrong("it calls the function of accel_demo.anatomy.devices: write your own")


def compare(function: Callable) -> None:
    """Raise `Wrong` if a result of the answer's function differs from `visible_devices`."""
    cases = [(rule, read, value, UUIDS) for rule, read, values in RULES for value in values]
    cases.append((*RULES[1][:2], "", UUIDS[:1]))  # every UUID starts with ""
    for rule, read, value, uuids in cases + random_cases(random.Random(SEED)):
        expected = as_text(visible_devices(value, uuids))
        try:
            result = as_text(function(value, list(uuids)))
        except (Wrong, NotImplementedError):
            raise
        except (Exception, SystemExit) as error:
            result = describe_error(error)
        if result != expected:
            machine = f"{value!r} on {len(uuids)} GPUs{matching_uuids(value, uuids)}"
            raise Wrong(f"{rule}. {machine} should be {expected}, got {result}", read)


def matching_uuids(value: str | None, uuids: list[str]) -> str:
    """Return the UUIDs that share a beginning with an id: " (GPU 0 is GPU-5e01…)"."""
    ids = [one for one in (value or "").split(",") if one.startswith("GPU-")]
    names = [
        f"GPU {number} is {uuid}"
        for number, uuid in enumerate(uuids)
        if any(uuid.startswith(one) or one.startswith(uuid) for one in ids)
    ]
    return f" ({', '.join(names)})" if names else ""


def random_cases(generator: random.Random) -> list[tuple[str, str, str, list[str]]]:
    """Return cases (rule, section, value, UUIDs) with 1 to 8 GPUs. No GPU is listed twice.

    Half of the values have one invalid id.
    """
    cases = []
    for number in range(RANDOM_VALUES):
        uuids = UUIDS[: generator.randint(1, len(UUIDS))]
        gpus = generator.sample(range(len(uuids)), generator.randint(1, len(uuids)))
        if generator.random() < 0.5:
            ids, invalid = [str(gpu) for gpu in gpus], ["-1", str(len(uuids)), "10", "99"]
        else:
            ids = [UUIDS[gpu][: generator.choice([7, 13, 40])] for gpu in gpus]
            invalid = ["GPU-f", "GPU-5e" if len(uuids) > 1 else "GPU-0"]
        rule, read = "cuda:N is the GPU of the Nth id, counted from 0", RENUMBERED
        if number % 2:
            rule, read = "an invalid id hides itself and all ids after it", HIDDEN
            ids.insert(generator.randint(0, len(ids)), generator.choice(invalid))
        cases.append((rule, read, ",".join(ids), uuids))
    return cases


def as_text(devices) -> str:
    """Return the same text for equal dictionaries, regardless of the order of their keys."""
    if isinstance(devices, dict):
        devices = dict(sorted(devices.items(), key=str))
    return repr(devices)


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, time_limit=20))

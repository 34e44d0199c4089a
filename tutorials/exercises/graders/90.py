"""Grade exercise 90: compare the answer with visible_devices, for each rule and for random values.

python tutorials/exercises/graders/90.py FILE
"""

import random
import sys
from pathlib import Path

from accel_demo.anatomy.devices import visible_devices
from accel_demo.lab.grading import Wrong, described, grade, import_answer

STARTS = "5e01 5e7c 0b3a 91d4 c2f8 d660 7a15 3f9b".split()  # two UUIDs start with GPU-5e
UUIDS = [f"GPU-{start}2d1c-77aa-4b1e-9c0d-{start}00aa55bb" for start in STARTS]
RULES = {  # {rule: test values}; the first rule that the answer breaks is printed
    "if the variable is not set, all GPUs are visible": [None],
    "an empty value hides all GPUs": ["", " "],
    "cuda:N counts the visible GPUs from 0, without gaps": ["0,4", "3", "2,5,7"],
    "the GPUs keep the order of the list": ["4,0", "7,1,3"],
    "spaces around a number are ignored": ["0, 4", " 2 ,5"],
    "-1 matches no GPU, and hides all ids after it": ["-1", "0,-1,4", "-1,-1", "3,-2"],
    "a number that matches no GPU hides all ids after it": ["0,8,4", "99", "1,2,12,3"],
    "a word matches no GPU, and hides all ids after it": ["x", "2,none,4", "1,,2", "0,1,"],
    "a number that appears twice hides all GPUs": ["0,0", "0,4,0", "3,2,1,2"],
    "a UUID is a valid id": [UUIDS[3], f"{UUIDS[6]},{UUIDS[2]}"],
    "a UUID may be shortened": ["GPU-9", "GPU-7a15,GPU-c", "GPU-5e0,GPU-5e7"],
    "a prefix of two UUIDs matches no GPU": ["GPU-5e", "GPU-9,GPU-5e,GPU-7", "GPU-"],
    "a UUID that matches no GPU hides all ids after it": ["GPU-ffff", "GPU-9,GPU-ff,GPU-7"],
    "two UUIDs that match the same GPU hide all GPUs": [
        f"GPU-91,{UUIDS[3]}",
        "GPU-c,GPU-c",
    ],
    "all ids must be of the same kind as the first id": [
        f"1,{UUIDS[4]}",
        f"{UUIDS[4]},1",
        "GPU-9,-1",
    ],
    "a UUID with spaces around it matches no GPU": [f"{UUIDS[0]}, {UUIDS[3]}", f" {UUIDS[3]}"],
    "a value that starts with MIG- is passed on unchanged": ["MIG-7c1d", f"MIG-{UUIDS[2]}/1/0"],
}
RANDOM_VALUES = 600
RIGHT = f"the results for {len(RULES)} rules and {RANDOM_VALUES} random values agree with CUDA"


def observe(answer: Path) -> None:
    function = import_answer(answer).visible_devices
    cases = [(rule, value, UUIDS) for rule, values in RULES.items() for value in values]
    for rule, value, uuids in cases + random_cases(random.Random()):
        expected = in_words(visible_devices(value, uuids))
        try:
            seen = in_words(function(value, list(uuids)))
        except (Exception, SystemExit) as error:
            seen = described(error)
        if seen != expected:
            raise Wrong(f"{rule}. {value!r} on {len(uuids)} GPUs should be {expected}, got {seen}")


def random_cases(generator: random.Random) -> list[tuple[str, str, list[str]]]:
    """Return random cases (rule, value, UUIDs) with 1 to 8 GPUs. No id occurs twice in a value."""
    numbers = [str(number) for number in range(-1, 10)]
    prefixes = [uuid[:length] for uuid in UUIDS for length in (6, 7, 13, len(uuid))]
    cases = []
    for kind in (numbers, prefixes, numbers + prefixes):
        for _ in range(RANDOM_VALUES // 3):
            ids = generator.sample([*kind, "GPU-f", "x"], generator.randint(1, 5))
            uuids = UUIDS[: generator.randint(1, 8)]
            cases.append(("a combination of rules", ",".join(ids), uuids))
    return cases


def in_words(devices) -> str:
    """Return the same text for equal dictionaries, whatever the order of their keys."""
    if isinstance(devices, dict):
        devices = dict(sorted(devices.items(), key=str))
    return repr(devices)


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, time_limit=20))

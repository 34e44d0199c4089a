"""Grade exercise 01: compare the answer with visible_devices, rule by rule, then at random.

python tutorials/exercises/graders/01.py FILE
"""

import argparse
import importlib.util
import json
import random
import shlex
import sys
import tempfile
from pathlib import Path

from accel_demo.anatomy.devices import visible_devices
from accel_demo.processes.launch import run_to_end

TIME_LIMIT = 20  # seconds; without a mistake it takes under two
STARTS = "5e01 5e7c 0b3a 91d4 c2f8 d660 7a15 3f9b".split()  # two begin with GPU-5e
UUIDS = [f"GPU-{start}2d1c-77aa-4b1e-9c0d-{start}00aa55bb" for start in STARTS]
RULES = {  # in this order: the first rule that is broken is named
    "where the variable is not set, all GPUs are visible": [None],
    "an empty value hides all GPUs": ["", " "],
    "cuda:N counts the visible GPUs from 0, without gaps": ["0,4", "3", "2,5,7"],
    "the order written counts": ["4,0", "7,1,3"],
    "blanks around a number do not count": ["0, 4", " 2 ,5"],
    "-1 is no GPU, and hides what follows it": ["-1", "0,-1,4", "-1,-1", "3,-2"],
    "a number that no GPU has hides what follows it": ["0,8,4", "99", "1,2,12,3"],
    "a word is no GPU, and hides what follows it": ["x", "2,none,4", "1,,2", "0,1,"],
    "a number that comes twice leaves no GPU": ["0,0", "0,4,0", "3,2,1,2"],
    "a UUID is an id, too": [UUIDS[3], f"{UUIDS[6]},{UUIDS[2]}"],
    "a UUID may be cut": ["GPU-9", "GPU-7a15,GPU-c", "GPU-5e0,GPU-5e7"],
    "a beginning that two UUIDs share is no id": ["GPU-5e", "GPU-9,GPU-5e,GPU-7", "GPU-"],
    "a UUID that no GPU has hides what follows it": ["GPU-ffff", "GPU-9,GPU-ff,GPU-7"],
    "a GPU that two UUIDs name comes twice, and leaves no GPU": [
        f"GPU-91,{UUIDS[3]}",
        "GPU-c,GPU-c",
    ],
    "the first id decides between numbers and UUIDs": [
        f"1,{UUIDS[4]}",
        f"{UUIDS[4]},1",
        "GPU-9,-1",
    ],
    "there are no blanks around a UUID": [f"{UUIDS[0]}, {UUIDS[3]}", f" {UUIDS[3]}"],
    "a value that starts with MIG- is passed on": ["MIG-7c1d", f"MIG-{UUIDS[2]}/1/0"],
}


def main(answer: Path) -> int:
    """Say which rule is broken first, and by which value; 0 where all are kept."""
    cases = [(rule, value, UUIDS) for rule, values in RULES.items() for value in values]
    cases += at_random(random.Random())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cases.json")
        file.write_text(json.dumps([(value, uuids) for _, value, uuids in cases]))
        program = "tutorials/exercises/graders/01.py"
        command = shlex.join(["python", program, str(answer), "--cases", str(file)])
        result = run_to_end(command, TIME_LIMIT)
        report = json.loads(file.read_text())
    if result.returncode is None:
        print(f"wrong: no answer within {TIME_LIMIT} s: is there a loop without an end?")
        return 1
    if isinstance(report, list):  # still the cases
        lines = result.stderr.splitlines() or ["it ended before its time"]
        report = {"broken": lines[-1]}
    if "broken" in report:
        print(f"wrong: the file cannot be used: {report['broken']}")
        return 1
    for (rule, value, uuids), seen in zip(cases, report["seen"], strict=True):
        expected = in_words(visible_devices(value, uuids))
        if seen != expected:
            print(f"wrong: {rule}. {value!r} on {len(uuids)} GPUs is {expected}; seen: {seen}")
            return 1
    print(f"right: {len(RULES)} rules and {len(cases)} values, as CUDA reads them")
    return 0


def at_random(generator: random.Random) -> list[tuple[str, str, list[str]]]:
    """Values made of all kinds of ids, none of them twice, for machines of one GPU to eight."""
    numbers = [str(number) for number in range(-1, 10)]
    beginnings = [uuid[:length] for uuid in UUIDS for length in (6, 7, 13, len(uuid))]
    cases = []
    for kind in (numbers, beginnings, numbers + beginnings):
        for _ in range(200):
            ids = generator.sample([*kind, "GPU-f", "x"], generator.randint(1, 5))
            uuids = UUIDS[: generator.randint(1, 8)]
            cases.append(("all rules together", ",".join(ids), uuids))
    return cases


def try_out(answer: Path, file: Path) -> None:
    """In a process of its own: call the answer with each case, and write down what it does."""
    cases, report = json.loads(file.read_text()), {"seen": []}
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = module.visible_devices
    except BaseException as error:  # also what would end this process
        report["broken"] = f"{type(error).__name__}: {error}"
        cases = []
    for value, uuids in cases:
        try:
            report["seen"].append(in_words(function(value, list(uuids))))
        except (Exception, SystemExit) as error:
            report["seen"].append(f"{type(error).__name__}: {error}")
    file.write_text(json.dumps(report))


def in_words(devices) -> str:
    """The same for equal dictionaries, whatever their order."""
    if isinstance(devices, dict):
        devices = dict(sorted(devices.items(), key=str))
    return repr(devices)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--cases", type=Path, help="be the process that calls the answer")
    options = parser.parse_args()
    if options.cases:
        try_out(options.answer, options.cases)
    else:
        sys.exit(main(options.answer.resolve()))

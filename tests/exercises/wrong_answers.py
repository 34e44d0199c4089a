"""Typical wrong answers to the exercises, with the message that each of them must cause.

They are in answers/NN/wrong.yaml. Most are edits of a right answer:

    does_not_average:
      message: every rank has the sum        # a part of what the grader has to print
      section: What an all-reduce returns    # the section to read; without this line, any
      of: right_1.py                         # without this line, our answer is edited
      diff: |
        -    import math
        @@
             dist.all_reduce(tensor)
        -    tensor /= world_size

"@@" separates two changes, and precedes a change whose first line stays. Each change must contain
enough lines to occur exactly once in the right answer.

A wrong answer that has little in common with any right answer has a `text` instead of a `diff`.

The default test run grades only the first three wrong answers of each exercise, so wrong.yaml
should start with typical ones that are judged quickly.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from accel_demo.lab.course.exercises import all_exercises

ANSWERS = Path(__file__).parent / "answers"


@dataclass(frozen=True)
class WrongAnswer:
    text: str
    message: str
    section: str = ""


def wrong_answers(number: str) -> dict[str, WrongAnswer]:
    """Return {name: wrong answer} for an exercise, in the order of the file."""
    folder, answers = ANSWERS / number, {}
    for name, entry in yaml.safe_load((folder / "wrong.yaml").read_text()).items():
        right = folder / entry["of"] if "of" in entry else all_exercises()[number].answer
        try:
            text = entry.get("text") or patched(right.read_text(), entry["diff"])
        except ValueError as error:
            raise ValueError(f"{name} of {right}: {error}") from None
        answers[name] = WrongAnswer(text, entry["message"], entry.get("section", ""))
    return answers


def patched(text: str, diff: str) -> str:
    """Apply the changes of a diff without line numbers, in order."""
    for change in filter(None, re.split("^@@\n", diff, flags=re.MULTILINE)):
        lines = change.splitlines(keepends=True)
        if strange := [line for line in lines if line[0] not in " -+"]:
            raise ValueError(f"a line of a diff must start with -, + or a space: {strange[0]!r}")
        old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        text = edited(text, old, new, start="^")  # whole lines
    return text


def edited(text: str, old: str, new: str, start: str = "") -> str:
    """Replace `old`, which must occur exactly once after the pattern `start`, by `new`."""
    text, count = re.subn(start + re.escape(old), lambda _: new, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"the old text must occur exactly once, but occurs {count} times:\n{old}")
    return text

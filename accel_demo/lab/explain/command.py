"""Explain the error messages in a log, or in a message that you paste.

accel-demo explain train.log
torchrun --standalone --nproc-per-node 2 train.py 2>&1 | accel-demo explain

Each message that the course explains is named, with its line, its cause and its cure as far as
they are known, and the page to read. The exit code is 0 if there is one, 1 if there is none, and 2
if the file can't be read. Nothing is sent anywhere.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab.explain.catalog import messages, pattern_of, pitfalls
from accel_demo.options import Parser
from accel_demo.wording import counted, listed

LONGEST = 160  # characters of a line of the log that are printed


@dataclass
class Explanation:
    """A message that occurs in a log, and what the course says about it."""

    message: str
    text: str  # the first line that contains it
    row: dict  # of messages.yaml, or empty
    pitfalls: list[dict]  # those that cause it
    lines: list[int] = field(default_factory=list)  # from 1


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit code."""
    parser = Parser(__doc__, prog="accel-demo explain")
    help = "a log, or - for standard input (default)"
    parser.add_argument("file", type=Path, nargs="?", default=Path("-"), metavar="FILE", help=help)
    options = parser.parse_args(arguments)
    lines = read(options.file)
    found = explain(lines)
    faults = [each for each in found if not each.row.get("harmless")]
    for number, each in enumerate(faults):
        print("\n" * bool(number) + "\n".join(described(each)))
    for each in found:
        if each not in faults:
            print(f"harmless: line {each.lines[0]}: {each.row['means']}")
    if not faults:
        print(
            "No line contains a message that the course explains. "
            "If the results are wrong, or the program hangs, run: accel-demo audit -- COMMAND"
        )
    return 0 if faults else 1


def read(file: Path) -> list[str]:
    """Return the lines of a file, or of standard input if it is `-`."""
    if str(file) == "-":
        if sys.stdin.isatty():
            print("Paste the message, then press Ctrl-D:", file=sys.stderr)
        return sys.stdin.buffer.read().decode(errors="replace").splitlines()
    try:
        return file.read_bytes().decode(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None


def explain(lines: list[str]) -> list[Explanation]:
    """Return the known messages in the lines, in the order of their first occurrence."""
    known: dict[str, Explanation] = {}
    for row in messages():
        message = row.get("search", row["message"])
        known[message] = Explanation(message, "", row, [])
    for pitfall in pitfalls():
        if message := pitfall.get("message"):
            known.setdefault(message, Explanation(message, "", {}, [])).pitfalls.append(pitfall)
    for each in known.values():
        pattern = pattern_of(each.message)
        each.lines = [number for number, line in enumerate(lines, 1) if pattern.search(line)]
        each.text = lines[each.lines[0] - 1].strip() if each.lines else ""
    found = [each for each in known.values() if each.lines]
    return sorted(found, key=lambda each: each.lines[0])


def described(each: Explanation) -> list[str]:
    """Return the lines that explain a message."""
    first, *more = each.lines
    also = f" (and {counted(len(more), 'more line')})" if more else ""
    text = each.text if len(each.text) <= LONGEST else f"{each.text[:LONGEST]} …"
    described = [f"line {first}{also}: {text}"]
    if means := each.row.get("means"):
        described.append(f"  {means}")
    for pitfall in each.pitfalls:
        described += [f"  {pitfall['title']}", f"    cause: {pitfall['cause']}"]
        described += [f"    cure: {pitfall['cure']}"]
        described += [f"    scripts: tutorials/pitfalls/{pitfall['name']}_broken.py and _fixed.py"]
    rows = [row for row in (each.row, *each.pitfalls) if "page" in row]
    pages = dict.fromkeys(f'page {row["page"]}, "{row["heading"]}"' for row in rows)
    return [*described, *([f"  read: {listed(list(pages))}"] if pages else [])]

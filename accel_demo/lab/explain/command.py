"""Explain the error messages in a log, or in a message that you paste.

accel-demo explain train.log
torchrun --standalone --nproc-per-node 2 train.py 2>&1 | accel-demo explain

Each known message is printed with its line, its cause, its cure, and the page that explains it, if
there is one. The exit code is 0 if a message is found, 1 if none or only harmless ones are, and 2
if the file can't be read. Nothing is sent anywhere.
"""

import re
import sys
from bisect import bisect
from dataclasses import dataclass, field
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab.explain.catalog import messages, pitfalls, places_of
from accel_demo.options import Parser
from accel_demo.terminal import display
from accel_demo.wording import counted, listed

LONGEST = 160  # characters of a line of the log that are printed
ERROR = re.compile(  # the last line of a traceback; launchers put the rank in front of it
    r"^(?:(?:\[\w+\]|\d+): *)*(?:\w+\.)*"
    r"(?!CalledProcess|ProcessExited|ProcessRaised)"  # they report another one
    r"\w*(?:Error|Exception)(?::.*)?$",
    re.MULTILINE,
)
HEADER = re.compile(r":$|NCCL error in: ")  # the message itself is on the next lines
RANK = re.compile(r"\[rank(\d+)\]:")  # as PyTorch marks the lines of a traceback
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[ -/]*[0-~])")


@dataclass
class Explanation:
    """What the course says about the message in some lines of a log."""

    start: int  # of the first of these lines in the log
    text: str  # of that line
    lines: list[int]  # from 1
    ranks: list[int]  # those that have printed it, as far as the lines say so
    row: dict  # of messages.yaml, the first that says this; or empty
    pitfalls: list[dict] = field(default_factory=list)  # those that cause it


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit code."""
    options = make_parser().parse_args(arguments)
    text = read(options.file)
    found = explain(text)
    faults = [each for each in found if not each.row.get("harmless")]
    for number, each in enumerate(faults):
        display("\n" * bool(number) + "\n".join(described(each)))
    if faults and (unknown := earlier_error(text, faults[0].start)):
        number, line = unknown
        display(
            f"\nline {number}: {printable(line)}\n  The course doesn't explain this error, which "
            "comes first and may be the cause of the others."
        )
    for each in found:
        if each not in faults:
            display(f"harmless: line {each.lines[0]}: {each.row['means']}")
    if not faults:
        display(
            f"No {'other ' * bool(found)}line contains a message that the course explains. "
            "If the results are wrong, or the program hangs, run: accel-demo audit -- COMMAND"
        )
    return 0 if faults else 1


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo explain")
    help = "a log, or - for standard input (default)"
    parser.add_argument("file", type=Path, nargs="?", default=Path("-"), metavar="FILE", help=help)
    return parser


def read(file: Path) -> str:
    """Return the text of a file, or of standard input if it is `-`, without escape codes."""
    if str(file) == "-":
        if sys.stdin is None:
            raise UserError("there is no standard input, so name a file: accel-demo explain FILE")
        if sys.stdin.isatty():
            print("Paste the message, then press Ctrl-D:", file=sys.stderr)
        content = sys.stdin.buffer.read()
    else:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UserError(f"{file} can't be read: {error.strerror}") from None
    is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # as `>` writes it in PowerShell 5
    text = content.decode("utf-16" if is_utf16 else "utf-8", errors="replace")
    return ESCAPES.sub("", text)


def explain(text: str) -> list[Explanation]:
    """Return what is known about the messages in a text, in the order of their first lines.

    Rows that say the same are one explanation. A pitfall belongs to the explanation of its line.
    """
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    text = text.replace("\r", "\n")  # a progress bar begins its line again

    def explanation(row: dict, places: list[tuple[int, int]]) -> Explanation:
        lines = sorted({bisect(line_starts, start) for start, _ in places})
        ranks = {int(rank) for place in places for rank in RANK.findall(text[slice(*place)])}
        start, end = min(places)
        return Explanation(start, text[start:end], lines, sorted(ranks), row)

    rows: dict[str, list[dict]] = {}
    for row in messages():
        rows.setdefault(row["means"], []).append(row)
    # A harmless row with its own `search` identifies its lines, so that no other row finds them.
    harmless = {
        place
        for row in messages()
        if row.get("harmless") and "search" in row
        for place in places_of(row["search"], text)
    }
    found = []
    for same in rows.values():
        searches = [row.get("search", row["message"]) for row in same]
        places = [place for each in searches for place in places_of(each, text)]
        if not same[0].get("harmless"):
            places = [place for place in places if place not in harmless]
        if places:
            found.append(explanation(same[0], places))
    for pitfall in pitfalls():
        if "message" in pitfall and (places := list(places_of(pitfall["message"], text))):
            new = explanation({}, places)
            owner = next((each for each in found if {*each.lines} & {*new.lines}), new)
            owner.pitfalls.append(pitfall)
            found += [owner] if owner is new else []
    return sorted(found, key=lambda each: each.start)


def earlier_error(text: str, end: int) -> tuple[int, str] | None:
    """Return the number and the text of the first line with a Python error before the first fault.

    The fault may only be its consequence on another rank. Errors that report the end of another
    process are left out, and so is the header of the fault itself, which no traceback follows.
    """
    lines = text.replace("\r", "\n")
    last_traceback = lines.rfind("Traceback (most recent call last)", 0, end)
    for match in ERROR.finditer(lines, 0, end):
        if match.start() < last_traceback or not HEADER.search(match[0].rstrip()):
            return text.count("\n", 0, match.start()) + 1, match[0]
    return None


def printable(line: str) -> str:
    """Return the beginning of a line without control characters."""
    line = "".join(each for each in line.strip().replace("\t", " ") if each.isprintable())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


def described(each: Explanation) -> list[str]:
    """Return the lines that explain a message."""
    first, *more = each.lines
    notes = [f"and {counted(len(more), 'more line')}"] if more else []
    if len(each.ranks) > 1:  # the line that is printed shows a single one
        notes.append(f"from ranks {', '.join(map(str, each.ranks))}")
    also = f" ({'; '.join(notes)})" if notes else ""
    described = [f"line {first}{also}: {printable(each.text)}"]
    if means := each.row.get("means"):
        described.append(f"  {means}")
    for pitfall in each.pitfalls:
        described += [f"  possible fault: {pitfall['title']}", f"    cause: {pitfall['cause']}"]
        described += [f"    cure: {pitfall['cure']}"]
        described += [f"    scripts: tutorials/pitfalls/{pitfall['name']}_broken.py and _fixed.py"]
    rows = [row for row in (each.row, *each.pitfalls) if "page" in row]
    pages = dict.fromkeys(f'page {row["page"]}, "{row["heading"]}"' for row in rows)
    return [*described, *([f"  read: {listed(list(pages))}"] if pages else [])]

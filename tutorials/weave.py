"""What the pages are woven from: each function prints Markdown made from a file or from a run.

cog -r -P -I tutorials README.md accel_demo/lab/BENCHMARKS.md tutorials/*.md       # refresh them
cog --check -P -I tutorials README.md accel_demo/lab/BENCHMARKS.md tutorials/*.md  # still true?
"""

import difflib
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

from accel_demo.lab.launch import REPOSITORY, run_to_end


def code(path: str, start: str | None = None, end: str | None = None) -> None:
    """The file as a code block: all of it, or from the line with `start` to before that with `end`.

    `end` is looked for after `start`; without it the block goes on to the end of the file.
    """
    language = {".py": "python", ".yaml": "yaml"}.get(Path(path).suffix, "text")
    _block(language, "\n".join(_part(path, start, end)))


def diff(
    a: str, b: str, context: int = 3, start: str | None = None, end: str | None = None
) -> None:
    """What has to change in file `a` to make it file `b`; of both only the part `code` would show.

    Line numbers count from the start of that part.
    """
    before, after = _part(a, start, end), _part(b, start, end)
    _block("diff", "\n".join(difflib.unified_diff(before, after, a, b, n=context, lineterm="")))


def count_changes(a: str, b: str) -> str:
    """In words: "12 lines added, 1 line removed", from `a` to `b`. It gives them; print them."""
    added, removed = changed_lines(a, b)
    return f"{_lines_in_words(added)} added, {_lines_in_words(removed)} removed"


def changed_lines(a: str, b: str) -> tuple[int, int]:
    """How many lines file `b` adds to file `a`, and how many it removes."""
    lines = difflib.unified_diff(_part(a), _part(b), n=0, lineterm="")
    marks = [line[0] for line in list(lines)[2:]]  # without the names of the files
    return marks.count("+"), marks.count("-")


def run(command: str, returncode: int = 0, in_order: bool = True, fence: bool = True) -> None:
    """The command and what it printed.

    Raises where it ends with another code than `returncode`. `in_order=False` sorts the lines: for
    processes that are not connected, and so cannot take turns. `fence=False` gives the output as
    the Markdown it is.
    """
    output = _output(command, returncode)
    if not in_order:
        output = "\n".join(sorted(output.splitlines()))
    _block("text", f"$ {command}\n{output}") if fence else print(output)


def picture(command: str, path: str, says: str) -> None:
    """The picture that `command --plot path` draws, and below it the Markdown the command prints.

    `says` is its text for those who cannot see it. The picture is drawn anew. `cog --check` writes
    no file: there a picture with other words than its file makes the page stale.
    """
    output, drawn = _drawing(command)
    file = REPOSITORY / path
    if "--check" not in sys.argv:
        file.write_text(drawn)
    if not file.exists() or _words(drawn) != _words(file.read_text()):
        print(f"**{path} is stale.**\n")
    print(f"![{says}]({file.name})\n\n{output}")


@cache
def _output(command: str, returncode: int) -> str:
    """What a command prints; one that several blocks or pages need is run once."""
    result = run_to_end(command)
    if result.returncode != returncode:
        ended = f"ended with {result.returncode}, not {returncode}"
        raise RuntimeError(f"{command}\n{ended}\n{result.stdout}\n{result.stderr}")
    return result.stdout.rstrip()


@cache
def _drawing(command: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "drawn.svg")
        return _output(f"{command} --plot {drawn}", 0), drawn.read_text()


def _part(path: str, start: str | None = None, end: str | None = None) -> list[str]:
    lines = (REPOSITORY / path).read_text().splitlines()
    first = _find(path, lines, start, 0) if start else 0
    return lines[first : _find(path, lines, end, first + 1) if end else len(lines)]


def _find(path: str, lines: list[str], text: str, first: int) -> int:
    for index in range(first, len(lines)):
        if text in lines[index]:
            return index
    raise ValueError(f"{path} has no line with {text!r} after line {first}")


def _block(language: str, text: str) -> None:
    fence = "````" if "```" in text else "```"
    print(f"{fence}{language}\n{text.rstrip()}\n{fence}")


def _lines_in_words(count: int) -> str:
    return f"{count or 'no'} line{'' if count == 1 else 's'}"


def _words(svg: str) -> list[str]:
    """The words of a matplotlib picture: it keeps each as a comment beside the drawn letters."""
    return re.findall(r"<!-- (.*?) -->", svg)

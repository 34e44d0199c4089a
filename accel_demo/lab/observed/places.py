"""Say where in the reader's script something was seen, and on which ranks."""

import linecache
import os
import re
from collections.abc import Sequence

FROM_TORCHRUN = re.compile(r"^.*(?:failed \(exitcode|closing signal)", re.MULTILINE)
LINES = 5  # of the log, in a message


class NotChecked(Exception):
    """Something could not be checked. The message is the reason."""


def text_of(place: Sequence) -> str:
    """Return the text of a line of the script. `place` starts with the file and the line number."""
    return linecache.getline(place[0], place[1]).strip()


def ranks_in_words(ranks: list[int], world: int) -> str:
    """Return for example "rank 1", "ranks 0, 2" or "all ranks"."""
    if len(ranks) == world > 1:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def short_path(path: str) -> str:
    """Return the path relative to the current folder, if the file is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def last_lines(log: str) -> list[str]:
    """Return the last lines before those in which torchrun reports the failure."""
    before = FROM_TORCHRUN.split(log, maxsplit=1)[0]
    lines = (before.strip() or log).splitlines()
    return [line[:200] for line in lines if line.strip()][-LINES:]

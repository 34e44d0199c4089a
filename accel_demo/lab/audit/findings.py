"""What an audit finds, and how it is printed."""

import linecache
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

ERROR, WARNING, NOTE = "error", "warning", "note"
VERDICTS = (ERROR, WARNING, NOTE)


@dataclass
class Finding:
    """One fault of the script.

    `check` is the name of the check, `sentence` says what is wrong, and `cure` how to repair it.
    `places` maps lines of the script, as (file, line number), to the ranks that it concerns. `page`
    is the file name of the page that explains it.
    """

    verdict: str
    check: str
    sentence: str
    cure: str
    page: str
    places: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def add_place(self, line: list | None, *ranks: int) -> "Finding":
        """Add a place of the script. `line` is [file, line number, function], or None."""
        if line is not None:
            known = self.places.setdefault((line[0], line[1]), [])
            known += [rank for rank in ranks if rank not in known]
        return self


class NotChecked(Exception):
    """A check could not be made. The message says why."""


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

"""Result of `accel-demo audit`: what it found, and what it could not check."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from accel_demo.lab.observed.places import text_of
from accel_demo.lab.observed.ranks import Rank

ERROR, WARNING, NOTE = "error", "warning", "note"  # proven, suspicious, a cost or a habit
VERDICTS = (ERROR, WARNING, NOTE)


@dataclass
class Place:
    """A line of the script, its text, and the ranks that the finding is about."""

    file: str
    line: int
    text: str
    ranks: list[int]


@dataclass
class Finding:
    """One fault of the script.

    `check` is the name of the check, `sentence` says what is wrong, and `cure` how to repair it.
    `page` is the name of the page in tutorials/ that explains it.
    """

    verdict: str
    check: str
    sentence: str
    cure: str
    page: str
    places: list[Place] = field(default_factory=list)

    def add_place(self, line: list | None, *ranks: int) -> "Finding":
        """Add a place. `line` is [file, line number, function], or None if it is unknown."""
        if line is None:
            return self
        for place in self.places:
            if (place.file, place.line) == (line[0], line[1]):
                place.ranks += [rank for rank in ranks if rank not in place.ranks]
                return self
        self.places.append(Place(line[0], line[1], text_of(line), list(ranks)))
        return self

    def add_places_of(self, ranks: Iterable[Rank], kind: str, **fields) -> "Finding":
        """Add the lines of the events of a kind with these fields."""
        for rank in ranks:
            for event in rank.of(kind):
                if all(event[name] == value for name, value in fields.items()):
                    self.add_place(event["line"], rank.number)
        return self


@dataclass
class RankSummary:
    """What was seen of one training process."""

    rank: int
    pid: int
    optimizer_steps: int
    batches: int
    collectives: int


@dataclass
class AuditResult:
    """Result of an audit. Paths are absolute.

    `exit_code` is that of the command, or None if it was killed, because training hung or did not
    end in time. `seconds_to_notice` is the time from the last event of any rank to the moment when
    a hang was noticed. `not_checked` maps the checks that could not be made to the reasons.
    `restored` are the files that the script had changed, and `new` those that it has created.
    """

    command_line: list[str]
    exit_code: int | None
    hang: bool
    seconds_to_notice: float | None
    out_of_time: bool
    stopped_after_steps: int | None
    ranks: list[RankSummary]
    findings: list[Finding]
    checked: list[str]
    not_checked: dict[str, str]
    waits: list[str]
    restored: list[str]
    not_restored: dict[str, str]
    new: list[str]
    killed_processes: int

    @property
    def has_findings(self) -> bool:
        """True if there is anything above a note."""
        return bool(self.waits) or any(finding.verdict != NOTE for finding in self.findings)

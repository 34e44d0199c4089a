"""What an audit has seen of a launch, and what it can be used for."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from accel_demo.lab.observed.places import NotChecked, ranks_in_words
from accel_demo.lab.observed.ranks import Rank

# Part of gloo's message: "Received data size doesn't match expected size. Is there a distributed
# collective mismatch in your code?"
MISMATCH = "collective mismatch"


@dataclass
class Evidence:
    """All that an audit has seen. `hang` is set if the training hung and was killed.

    `log` is the end of what the command has printed.
    """

    ranks: list[Rank]
    exit_code: int | None
    log: str = ""
    hang: bool = False
    out_of_time: bool = False
    seconds_to_notice: float = 0.0  # from the last event to the moment when the hang was noticed
    other_launches: list[list[Rank]] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)  # files opened, but not written to

    def __post_init__(self):
        if self.exit_code == 0:  # so the script has caught what `sys.exit` raises
            for rank in self.ranks:
                rank.events = [event for event in rank.events if event["kind"] != "exit"]

    @property
    def world(self) -> int:
        """Number of processes that were started."""
        return max([rank.world for rank in self.ranks] + [len(self.ranks)])

    @property
    def clones(self) -> list[Rank]:
        """The ranks whose `Accelerator()` trains alone, although several processes were started."""
        first = [(rank, rank.first("accelerator")) for rank in self.ranks]
        return [rank for rank, event in first if event and event["processes"] < self.world]

    def stopped_by_gloo(self) -> list[Rank]:
        """Return the ranks that gloo has stopped because they received data of a wrong size.

        It raises an error, or ends the process and prints the message.
        """
        return [
            rank
            for rank in self.ranks
            if (rank.error and MISMATCH in rank.error["message"])
            or (rank.crash and rank.error is None and MISMATCH in self.log)
        ]

    @property
    def is_distributed(self) -> bool:
        return any(rank.connected_world > 1 for rank in self.ranks) and not self.clones

    @property
    def has_messages(self) -> bool:
        """True if a rank has sent or received a message to or from a single other rank."""
        recorded = (each["is_p2p"] for rank in self.ranks for each in rank.collectives)
        return any(self.counts("message")) or any(recorded)

    def require_all_events(self) -> None:
        """Raise `NotChecked` if not all events of the ranks could be written and read."""
        if lost := [rank.number for rank in self.ranks if rank.of("lost")]:
            who = ranks_in_words(lost, len(self.ranks))
            raise NotChecked(f"events of {who} were lost (is a disk full?)")
        if any(rank.of("lost") for launch in self.other_launches for rank in launch):
            raise NotChecked("events of a process were lost (is a disk full?)")

    def require_connected(self) -> None:
        """Raise `NotChecked` unless the ranks were connected."""
        if not self.is_distributed:
            raise NotChecked("the ranks were not connected")

    def require_data_parallel(self) -> None:
        """Raise `NotChecked` unless the ranks were connected, and all train the same parameters."""
        self.require_connected()
        wrapped = [(rank, event) for rank in self.ranks for event in rank.of("wrapped")]
        if any(event["ranks"] < rank.connected_world for rank, event in wrapped):
            raise NotChecked("a model is trained by a part of the ranks")
        if any(self.counts("tensor parallel")):
            raise NotChecked("tensors are divided between the ranks: this is not data-parallel")
        if all(self.counts("weights")) and not self.optimizers:
            raise NotChecked("each rank trains other parameters: this is not data-parallel")

    @cached_property
    def optimizers(self) -> list[tuple[int, ...]]:
        """The optimizers that all ranks step, as the numbers that the ranks have given them.

        If all ranks create as many optimizers at the same lines, those belong together that have
        the same place in this order. Otherwise, for example if one rank trains a probe, those of
        equal shapes belong together, in the order of their first steps. If not all ranks step
        optimizers of the same shapes, also the lines that create them are equal.
        """
        lists = [rank.of("weights") for rank in self.ranks]
        shapes = [[each["shapes"] for each in events] for events in lists]
        created = [
            {each["optimizer"]: each["line"] for each in rank.of("optimizer")}
            for rank in self.ranks
        ]
        lines = [list(each.values()) for each in created]
        groups: list[dict[str, list[int]]] = []
        for events, made in zip(lists, created, strict=True):
            if lines.count(lines[0]) == len(lines):
                key_of = {number: place for place, number in enumerate(made)}
            else:
                key_of = {} if shapes.count(shapes[0]) == len(shapes) else made
            groups.append({})
            for each in events:
                number = each["optimizer"]
                key = str([key_of.get(number), each["shapes"]])
                groups[-1].setdefault(key, []).append(number)
        same = [[own.get(key, []) for own in groups] for key in groups[0]]
        return [numbers for each in same for numbers in zip(*each, strict=False)]

    @property
    def joins(self) -> bool:
        """True if training ran inside torch.distributed.algorithms.join.Join, as in DDP.join()."""
        return any(self.counts("join"))

    @property
    def is_shortened_unevenly(self) -> bool:
        """True if the audit has ended a pass on one rank, and another rank has read more of it."""
        read = Counter(
            (rank.number, batch["loader"], batch["number"])
            for rank in self.ranks
            for batch in rank.of("batch")
        )
        return any(
            read[other.number, end["loader"], end["number"]] > end["batches"]
            for rank in self.ranks
            for end in rank.of("pass end")
            for other in self.ranks
            if end["batches"] != end["whole"]
        )

    def counts(self, kind: str) -> list[int]:
        return [len(rank.of(kind)) for rank in self.ranks]

"""Do all ranks have the same number of batches?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import ERROR, Finding, NotChecked

PAGE = "30_who_saw_which_sample"


def check(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.is_distributed:
        raise NotChecked("the ranks were not connected")
    ranks = [rank for rank in evidence.ranks if rank.training_passes]
    if len(ranks) < 2:
        raise NotChecked("no data loader was used for training")
    unknown = 0
    for loader in ranks[0].training_passes:
        lengths = {
            rank.number: _batches(rank, loader) for rank in ranks if loader in rank.training_passes
        }
        unknown += None in lengths.values()
        if None in lengths.values() or len(set(lengths.values())) == 1:
            continue
        finding = Finding(
            ERROR,
            "batches",
            "The ranks have different numbers of batches: "
            + ", ".join(f"rank {rank} has {length}" for rank, length in lengths.items())
            + ". The last batches wait for ranks that have none.",
            "Let a DistributedSampler or accelerator.prepare divide the samples evenly, or train "
            "inside torch.distributed.algorithms.join.Join.",
            PAGE,
        )
        for rank in ranks:
            finding.add_place(rank.pass_of(loader)["line"], rank.number)
        yield finding
    if unknown:
        raise NotChecked("a loader has no length, and was shortened (see --batches)")


def _batches(rank, loader: int) -> int | None:
    """Return the number of batches of the first pass, or None if the pass was shortened."""
    length = rank.pass_of(loader)["length"]
    if length is not None:
        return length
    ends = [each for each in rank.of("pass end") if (each["loader"], each["number"]) == (loader, 0)]
    return ends[0]["batches"] if ends and not ends[0]["shortened"] else None

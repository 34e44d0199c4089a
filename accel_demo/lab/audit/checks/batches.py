"""Do all ranks have the same number of batches?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence, Rank
from accel_demo.lab.audit.result import ERROR, Finding, NotChecked

PAGE = "30_who_saw_which_sample"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_connected()
    if evidence.joins:
        raise NotChecked("the ranks train inside Join, which allows different numbers")
    ranks = [rank for rank in evidence.ranks if rank.training_passes]
    if len(ranks) < 2:
        raise NotChecked("no data loader was used for training")
    unknown = 0
    for loader in ranks[0].training_passes:
        readers = [rank for rank in ranks if loader in rank.training_passes]
        for number in range(min(len(rank.training_passes[loader]) for rank in readers)):
            lengths = {rank.number: _batches(rank, loader, number) for rank in readers}
            unknown += None in lengths.values()
            if None not in lengths.values() and len(set(lengths.values())) > 1:
                yield _finding(readers, loader, number, lengths)
                break
    if unknown:
        raise NotChecked("a loader has no length, and was shortened (see --batches)")


def _finding(ranks: list[Rank], loader: int, number: int, lengths: dict) -> Finding:
    finding = Finding(
        ERROR,
        "batches",
        f"The ranks have different numbers of batches in pass {number + 1}: "
        + ", ".join(f"rank {rank} has {length}" for rank, length in lengths.items())
        + ". The last batches wait for ranks that have none.",
        "Let a DistributedSampler or accelerator.prepare divide the samples evenly, or train "
        "inside torch.distributed.algorithms.join.Join.",
        PAGE,
    )
    for rank in ranks:
        finding.add_place(rank.pass_of(loader, number)["line"], rank.number)
    return finding


def _batches(rank: Rank, loader: int, number: int) -> int | None:
    """Return the number of batches of a whole pass, or None if it was shortened."""
    length = rank.pass_of(loader, number)["length"]
    if length is not None:
        return length
    ends = [
        each for each in rank.of("pass end") if (each["loader"], each["number"]) == (loader, number)
    ]
    return ends[0]["batches"] if ends and not ends[0]["shortened"] else None

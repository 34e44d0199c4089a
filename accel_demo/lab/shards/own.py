"""Find out which rank of an observed script has read which sample of each of its loaders."""

from collections import Counter
from dataclasses import dataclass, field, replace

from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import short_path, text_of
from accel_demo.lab.observed.ranks import Rank, batches_of, contents
from accel_demo.lab.observed.streams import differing_streams, equal_workers
from accel_demo.lab.output import MeasuredFinding
from accel_demo.lab.shards.result import (
    Batches,
    EpochReads,
    epoch_reads,
    explain_uneven_batches,
)
from accel_demo.wording import counted

LEAST = 8  # samples; the order of fewer may be equal by chance
MOST_SHARED = 0.5  # of the contents that a rank reads; more are not equal by chance
NEARLY_ALL = 0.9
AT_LEAST = "Each sample is read at least"


@dataclass(frozen=True)
class OwnLoader:
    """What the ranks read with one loader of the script.

    `by_content` is True if samples are told apart by their content, because the loader reads a
    stream, does not use integers as indices, or reads a different dataset on each rank. Then
    `samples` is the number of different contents. `ended_after` is the number of batches after
    which a pass was ended, because it was too long, or None. `by_worker` are the numbers of samples
    that the loader workers of each rank have read in the first epoch. `is_dispatched` is True if
    rank 0 reads for all ranks. `findings` are the sentences about what is wrong.
    """

    name: str
    samples: int
    by_content: bool
    trains: bool
    epochs: list[EpochReads]
    findings: list[str]
    ended_after: int | None = None
    by_worker: list[list[int]] = field(default_factory=list)
    is_dispatched: bool = False


@dataclass(frozen=True)
class OwnShardsResult:
    """The samples that the processes of a command read with each of its loaders."""

    processes: int
    command_line: list[str]
    exit_code: int | None
    loaders: list[OwnLoader]
    findings: list[MeasuredFinding]


def loaders_of(evidence: Evidence) -> list[OwnLoader]:
    """Return the loaders of the observed script in the order in which they were first read.

    A loader whose batches contain nothing to tell samples apart is left out. Raises `NotChecked` if
    events were lost.
    """
    evidence.require_all_events()
    numbers = sorted({each["loader"] for rank in evidence.ranks for each in rank.of("batch")})
    loaders = [_loader(evidence.ranks, number) for number in numbers]
    return [loader for loader in loaders if loader.samples]


def _loader(ranks: list[Rank], number: int) -> OwnLoader:
    begun = [each for rank in ranks for each in rank.of("pass") if each["loader"] == number]
    about, events = begun[0], [batches_of(rank, number) for rank in ranks]
    known = [event for batches in events for event in batches]
    # Equal indices mean equal samples only in equal datasets, not in parts of one.
    data = {each["identity"] for each in begun}
    by_content = len(data) > 1 or not all(event.get("indices") for event in known)
    ids: dict[int, int] = {}  # content -> number of the sample
    passes = sorted({event["number"] for event in known})
    read = [
        [_ids(batches, each, ids if by_content else None) for batches in events] for each in passes
    ]
    samples = len(ids) if by_content else about["samples"]
    epochs = [
        epoch_reads(place, batches, read[0], samples, _is_complete(ranks, number, own))
        for place, (own, batches) in enumerate(zip(passes, read, strict=True), start=1)
    ]
    if by_content:  # what else a stream contains is unknown
        epochs = [replace(epoch, never=None) for epoch in epochs]
    trains = any(number in rank.training_passes for rank in ranks)
    name = f"{short_path(about['line'][0])}:{about['line'][1]} {text_of(about['line'])}"
    findings = _findings(about, epochs, len(ranks), by_content) if trains and epochs else []
    if trains and number in equal_workers(ranks):
        findings = [each for each in findings if not each.startswith(AT_LEAST)]
        findings.append(
            "The loader workers of a rank read the same samples: divide the stream between the "
            "workers, too, with get_worker_info."
        )
    if trains and number in differing_streams(ranks):
        findings.append(
            "The ranks' streams yield different samples, and Accelerate keeps only a part of each: "
            "most of what it leaves out is never read. Let each rank yield the whole stream, or "
            "don't prepare the loader."
        )
    if trains and (missed := _missed(ranks, number, epochs)):
        findings.append(
            f"The same {counted(len(missed), 'sample')} of {samples} are not read in any epoch."
        )
    ends = [each for rank in ranks for each in rank.of("pass end") if each["loader"] == number]
    ended_after = max((each["batches"] for each in ends if _is_shortened(each)), default=None)
    by_worker = [_by_worker(rank, number, passes[0]) for rank in ranks if rank.of("batch")]
    given = any(each["loader"] == number for rank in ranks for each in rank.of("given"))
    dispatched = given and about["samples"] is None
    return OwnLoader(
        name, samples, by_content, trains, epochs, findings, ended_after, by_worker, dispatched
    )


def _by_worker(rank: Rank, loader: int, number: int) -> list[int]:
    """Return how many samples each loader worker of a rank has read in a pass."""
    counts: Counter[int] = Counter()
    for batch in rank.of("batch"):
        if (batch["loader"], batch["number"]) == (loader, number) and "worker" in batch:
            counts[batch["worker"]] += len(contents(batch))
    return [counts[worker] for worker in range(max(counts, default=-1) + 1)]


def _ids(batches: list[dict], number: int, ids: dict[int, int] | None) -> Batches:
    """Return the samples of one pass, batch by batch. `ids` numbers contents, or is None."""
    own = [batch for batch in batches if batch["number"] == number]
    if ids is None:
        return [batch["indices"] for batch in own]
    return [[ids.setdefault(each, len(ids)) for each in contents(batch)] for batch in own]


def _is_complete(ranks: list[Rank], loader: int, number: int) -> bool:
    """Return True if every rank that has begun a pass has also read its last batch."""
    begun = [rank for rank in ranks if _has("pass", rank, loader, number)]
    reading = [rank for rank in begun if _has("batch", rank, loader, number)]
    return bool(reading) and all(_has("pass end", rank, loader, number) for rank in reading)


def _has(kind: str, rank: Rank, loader: int, number: int) -> bool:
    return any(
        each["loader"] == loader and each["number"] == number and not _is_shortened(each)
        for each in rank.of(kind)
    )


def _is_shortened(event: dict) -> bool:
    """Return True for the end of a pass that the observer has ended, see limits.py."""
    return event["kind"] == "pass end" and event["batches"] != event["whole"]


def _missed(ranks: list[Rank], number: int, epochs: list[EpochReads]) -> set[int]:
    """Return the samples that a loader misses in each of its complete epochs, or an empty set.

    It is empty if the last samples were dropped, or if the loader is to read a part of the dataset:
    if it has a subset's sampler, or another loader reads some of the others.
    """
    whole = [epoch for epoch in epochs if epoch.is_complete and epoch.never is not None]
    if len(ranks) < 2 or len(whole) < 2 or any(e.never != whole[0].never for e in whole):
        return set()
    missed = set(whole[0].never or [])
    sizes = [len(batch) for batches in whole[0].batches for batch in batches]
    begun = [each for rank in ranks for each in rank.of("pass")]
    own = next(each for each in begun if each["loader"] == number)
    if not sizes or len(missed) <= len(ranks) * max(sizes) or "Subset" in own["sampler"]:
        return set()
    others = {
        each["loader"]
        for each in begun
        if (each["identity"], each["samples"]) == (own["identity"], own["samples"])
    } - {number}
    batches = [each for rank in ranks for each in rank.of("batch") if each["loader"] in others]
    read_by_others = {index for batch in batches for index in batch.get("indices") or []}
    return set() if missed & read_by_others else missed


def _findings(about: dict, epochs: list[EpochReads], processes: int, by_content: bool) -> list[str]:
    """Say what is wrong with a loader that is used for training."""
    whole = [epoch for epoch in epochs if epoch.is_complete]
    if processes < 2 or not whole or about["replacement"]:
        return []
    first, findings = whole[0], []
    sizes = [len(batch) for batches in first.batches for batch in batches]
    global_batch, read = processes * max(sizes), sum(sizes)
    by_rank = [[each for batch in batches for each in batch] for batches in first.batches]
    again = read - len({each for ids in by_rank for each in ids})
    # A rank that reads an index twice samples with replacement: so may the others.
    repeats_alone = any(len(set(ids)) < len(ids) for ids in by_rank)
    are_unique = all(len(set(ids)) >= NEARLY_ALL * len(ids) for ids in by_rank)
    if by_content:
        times = Counter(each for ids in by_rank for each in ids)
        fewest = min(times.values())
        # Rows of a table with few different values are equal by chance, and some more often.
        are_even = list(times.values()).count(fewest) >= NEARLY_ALL * len(times)
        if are_unique and (share := _share(first)) > MOST_SHARED:
            findings.append(f"{share:.0%} of what a rank reads, another rank reads, too.")
        elif fewest > 1 and are_even and len(times) >= LEAST:
            findings.append(f"{AT_LEAST} {fewest} times in an epoch.")
    elif again >= global_batch and not repeats_alone:  # padding of the last batch is less
        findings.append(
            f"{counted(len(first.more_than_once), 'sample')} are read more than once in an epoch, "
            "which is more than what fills up the last batch."
        )
    parts = 1
    for _, number, _ in about["divided_by"]:
        parts *= number
    if parts > processes and first.never:
        findings.append(
            f"{counted(len(first.never), 'sample')} are never read, because the samples are "
            f"divided into {parts} parts for {processes} processes."
        )
    orders = [epoch.batches for epoch in whole]
    repeats = len(orders) > 1 and all(order == orders[0] for order in orders)
    if repeats and about["shuffle"] and read >= LEAST:
        findings.append("The sampler shuffles, but each epoch has the same order.")
    lengths = [[len(batch) for batch in batches] for batches in first.batches]
    if any(each != lengths[0] for each in lengths):
        reason = explain_uneven_batches(first.batches)
        findings.append(reason[0].upper() + reason[1:])
    return findings


def _share(epoch: EpochReads) -> float:
    """Return which part of what a rank has read another rank has read, too; the largest one."""
    read = [{each for batch in batches for each in batch} for batches in epoch.batches]
    pairs = [(one, two) for one in read for two in read if one is not two and one]
    return max((len(one & two) / len(one) for one, two in pairs), default=0.0)

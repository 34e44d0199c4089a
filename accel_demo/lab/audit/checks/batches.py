"""Do all ranks have the same number of batches?"""

import re
from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked, text_of
from accel_demo.lab.observed.ranks import Rank

PAGE = "30_who_saw_which_sample"
READS_A_PART = re.compile(r"\b(iter|islice|zip)\(")  # of a loader


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    if evidence.joins:
        raise NotChecked("the ranks train inside Join, which allows different numbers")
    ranks = [rank for rank in evidence.ranks if rank.training_passes]
    if len(ranks) < 2:
        raise NotChecked("no step has used gradients from the batches of a data loader")
    unknown = False
    passes = [rank.begun_for_training for rank in ranks]
    if any(begin["in_generator"] for begins in passes for begin in begins):
        raise NotChecked("a generator repeats the loader, so training may count steps")
    lines = [text_of(begin["line"] or ["", 0]) for begins in passes for begin in begins]
    if any(map(READS_A_PART.search, lines)):
        raise NotChecked(
            "the loader is read with iter(), islice() or zip(), perhaps not to its end"
        )
    ends = [event for rank in ranks for event in rank.of("pass end")]
    if all(map(_ended, ranks)) and not any(end["batches"] != end["whole"] for end in ends):
        return  # the passes were whole, and nobody has waited for a rank without batches
    for number, begins in enumerate(zip(*passes, strict=False)):
        if len({str(begin["line"]) for begin in begins}) > 1:
            break  # the ranks read different loaders
        lengths = [_batches(rank, begin) for rank, begin in zip(ranks, begins, strict=True)]
        known = [length for length in lengths if length is not None]
        unknown |= len(known) < len(lengths)
        if len(known) == len(lengths) and len(set(known)) > 1:
            ends = [_end(rank, begin) for rank, begin in zip(ranks, begins, strict=True)]
            is_left = [
                end is None
                and (rank.begun_for_training[-1]["time"] > begin["time"] or _ended(rank))
                for rank, begin, end in zip(ranks, begins, ends, strict=True)
            ]
            if any(is_left):
                raise NotChecked("the script leaves a loader before its end")
            shortest = ends[known.index(min(known))]
            counts = (f"rank {rank.number} has {n}" for rank, n in zip(ranks, lengths, strict=True))
            finding = Finding(
                ERROR if shortest and shortest["batches"] == shortest["whole"] else WARNING,
                "batches",
                f"The ranks have different numbers of batches in pass {number + 1}: "
                f"{', '.join(counts)}. The last batches wait for ranks that have none.",
                "Let a DistributedSampler or accelerator.prepare divide the samples evenly, or "
                "train inside torch.distributed.algorithms.join.Join.",
                PAGE,
            )
            for rank, begin in zip(ranks, begins, strict=True):
                finding.add_place(begin["line"], rank.number)
            yield finding
            return
    if unknown:
        raise NotChecked("a loader has no length, and was shortened (see --batches)")


def _ended(rank: Rank) -> bool:
    """Return True if the script has ended by itself."""
    return bool(rank.end and not rank.error and not rank.of("enough"))


def _batches(rank: Rank, begin: dict) -> int | None:
    """Return the number of batches of a whole pass, or None if it is unknown."""
    if begin["length"] is not None:
        return begin["length"]
    end = _end(rank, begin)
    return end["whole"] if end else None


def _end(rank: Rank, begin: dict) -> dict | None:
    """Return the event with which a pass ended, or None if the script has not read all batches."""
    ends = [each for each in rank.of("pass end") if each["loader"] == begin["loader"]]
    return next((end for end in ends if end["number"] == begin["number"]), None)

"""Does each metric contain every sample of all ranks exactly once?"""

import math
import re
from collections.abc import Iterator

from accel_demo.lab.audit.checks.samples import equal_samples, indices_of
from accel_demo.lab.audit.padding import gathers_of, padded_results
from accel_demo.lab.audit.result import NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank
from accel_demo.wording import counted

PAGE = "30_who_saw_which_sample"
LEAST = 8  # samples that two ranks evaluate. Fewer may be equal by chance, in a draw of each rank
OF_PASSES = ("pass", "batch", "pass end")  # kinds of events
SUMS = re.compile(r"all_?reduce")  # names of collectives
CHANGES = ("write", "save", "rename", "append")  # of a file
# Callers of collectives that combine no results: replicas, shards, random states, checkpoints
OF_LIBRARIES = re.compile(
    r"/torch/(nn/parallel|distributed/(fsdp|_composable|optim|checkpoint))/"
    r"|/accelerate/(utils/random|data_loader)\.py$"
)


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    evaluations = [_evaluations(rank) for rank in evidence.ranks]
    common = set.intersection(*map(set, evaluations))
    gathers = [gathers_of(rank) for rank in evidence.ranks]
    if not common and not any(gathers):
        raise NotChecked("no evaluation of a loader that is divided between the ranks was seen")
    yield from padded_results(evidence.ranks, gathers)
    by_loader: dict[int, list] = {}
    for key in sorted(common):
        each = [passes[key] for passes in evaluations]
        if len({str(begin["line"]) for begin, _ in each}) == 1:
            by_loader.setdefault(key[0], []).append(each)
    unknown = unclear = False
    compared: dict[str, bool] = {}  # is at least one evaluation at this line?
    for evaluations in by_loader.values():
        for each in evaluations:
            line = str(each[0][0]["line"])
            compared[line] = compared.get(line, False) or bool(_shares(evidence.ranks, each))
        known = [each for each in evaluations if _is_known(evidence.ranks, each)]
        unknown |= len(known) < len(evaluations)
        unclear |= not all(_surely_combined(evidence.ranks, each) for each in known)
        if known and (finding := _of_shares(evidence, known)):
            begins = [begin for begin, _ in known[0]]
            for rank, begin in zip(evidence.ranks, begins, strict=True):
                finding.add_place(begin["line"], rank.number)
            yield finding
    if unknown:
        raise NotChecked("there were more collectives than the Flight Recorder stores")
    if unclear:
        raise NotChecked("what the collectives after an evaluation combine is unknown")
    if not all(compared.values()):
        raise NotChecked(
            "the samples of an evaluation are too few, or not recorded, to compare them"
        )


def _of_shares(evidence: Evidence, evaluations: list) -> Finding | None:
    """Report that the results of a loader are never combined, or contain repeated samples.

    `evaluations` are those of one loader, each a list with the result of `_evaluations` per rank.
    """
    begin, _ = evaluations[0][0]
    combined = [_is_combined(evidence.ranks, each) for each in evaluations]
    written = [_is_written(evidence.ranks, each) for each in evaluations]
    if not any(combined + written):
        if _passed_on_otherwise(evidence):
            raise NotChecked("the ranks may combine their results without a recorded collective")
        is_reported = all(_is_reported(evidence.ranks, each) for each in evaluations)
        return Finding(
            WARNING if is_reported else NOTE,
            "metrics",
            f"Each rank evaluates its own share of {begin['samples'] or 'the'} samples, but no "
            "collective combines the results: "
            + (
                "the number that is printed is only the metric of one share."
                if is_reported
                else "if they are a metric, each rank has only that of its own share."
            ),
            "Add up the results of all ranks, for example with dist.all_reduce or "
            "accelerator.gather_for_metrics, before you use the metric.",
            PAGE,
        )
    for each in evaluations:
        if repeated := _repeated(evidence.ranks, each):
            return Finding(
                WARNING,
                "metrics",
                f"At least {repeated} of the {begin['samples']} samples are evaluated by two "
                "ranks, and others by none: the ranks probably shuffle them differently.",
                "Don't shuffle, or give the sampler a generator with the same seed on all ranks. "
                "The global generator differs if one rank alone has drawn random numbers.",
                PAGE,
            )
    if all(combined) and begin["padded"]:
        return _of_padding(begin, evidence.ranks, evaluations)
    return None


def _of_padding(begin: dict, ranks: list[Rank], evaluations: list) -> Finding | None:
    """Report that results of all ranks may contain repeated samples. None if something drops them.

    Accelerate's `gather_for_metrics` drops them, so there must be sums, and nothing is gathered.
    """
    sampler = begin["sampler"]
    if sampler == "DistributedSampler":
        cure = "Put the results of all ranks back into the sampler's order, and keep as many as "
        cure += "the dataset has samples."
    elif any(name == "BatchSamplerShard" for name, *_ in begin["divided_by"]):
        calls = [call for each in evaluations for call in _combining(ranks[0], each[0])]
        if not all(SUMS.search(call["name"]) for call in calls):
            return None
        sampler = "Accelerate"
        cure = "Pass the results of each batch, one per sample, to "
        cure += "accelerator.gather_for_metrics, which drops them."
    else:
        return None
    return Finding(
        NOTE,
        "metrics",
        f"{sampler} repeats {counted(begin['padded'], 'sample')} in this evaluation, so that all "
        "ranks have equally many: a metric of all ranks counts them twice, unless the script "
        "drops them.",
        cure,
        PAGE,
    )


def _evaluations(rank: Rank) -> dict[tuple[int, int], tuple[dict, float]]:
    """Return the evaluations of a loader that is divided, and when training went on.

    An evaluation is a whole pass over a loader that is never used for training, after at least one
    step, with a model set to `eval` and without a backward pass. The time is infinite if the run
    ended; if it ended early, the evaluation is left out.
    """
    found: dict[tuple[int, int], tuple[dict, float]] = {}
    waiting: list[dict] = []  # passes that have not ended
    ended: list[dict] = []  # evaluations after which training has not gone on yet
    is_set, steps = False, 0
    for event in rank.events:
        kind, key = event["kind"], (event.get("loader"), event.get("number"))
        is_of_training = kind in OF_PASSES and key[0] in rank.training_passes
        if is_of_training and kind == "pass" and key[1] == 0:
            ended.clear()  # a new loader: perhaps the model has labeled or chosen its samples
        if is_of_training or kind in ("backward", "step"):
            found |= {(each["loader"], each["number"]): (each, event["time"]) for each in ended}
            ended.clear()
        if kind in ("backward", "step"):
            is_set, waiting = False, []
            steps += kind == "step"
        elif kind == "eval":
            is_set = True
        elif kind == "pass" and not is_of_training and steps:
            waiting.append(event)
        elif kind == "pass end":
            whole = [each for each in waiting if (each["loader"], each["number"]) == key]
            waiting = [each for each in waiting if each not in whole]
            ended += [each for each in whole if is_set and _parts(each) == rank.connected_world]
    if rank.end and not rank.error and not rank.of("enough"):
        found |= {(each["loader"], each["number"]): (each, float("inf")) for each in ended}
    return found


def _shares(ranks: list[Rank], evaluation: list) -> list[list[dict]]:
    """Return the batches of each rank, without a last one that may repeat samples as padding.

    The list is empty if a rank has no other batch, or if not all samples are recorded.
    """
    shares = []
    for rank, (begin, _) in zip(ranks, evaluation, strict=True):
        key = begin["loader"], begin["number"]
        batches = [each for each in rank.of("batch") if (each["loader"], each["number"]) == key]
        shares.append(batches if begin["padded"] == 0 else batches[:-1])
    is_known = all(batches and all(each.get("indices") for each in batches) for batches in shares)
    return shares if is_known else []


def _repeated(ranks: list[Rank], evaluation: list) -> int:
    """Return how many samples of the first rank another rank evaluates, too. 0 if it may.

    A draw with replacement may repeat samples: as a rule, also a rank's own ones. If one rank reads
    the loader more often, the passes do not belong together.
    """
    shares, begins = _shares(ranks, evaluation), [begin for begin, _ in evaluation]
    orders = list(map(indices_of, shares))
    is_drawn = any(begin["replacement"] for begin in begins)
    loaders = [[each["loader"] for each in rank.of("pass")] for rank in ranks]
    passes = {each.count(begins[0]["loader"]) for each in loaders}
    if not shares or is_drawn or len(passes) > 1:
        return 0
    if any(len(set(each)) < len(each) for each in orders):
        return 0
    repeated = [
        len(equal_samples(shares[0], share, begin["identity"] == begins[0]["identity"] is not None))
        for share, begin in zip(shares[1:], begins[1:], strict=True)
    ]
    return max(repeated) if max(repeated) >= LEAST else 0


def _parts(begin: dict) -> int:
    """Return the number of parts into which samplers divide the samples of a pass."""
    return math.prod(parts for _, parts, _ in begin["divided_by"])


def _is_known(ranks: list[Rank], evaluation: list) -> bool:
    """Return True if the Flight Recorder still has all collectives since the evaluation began."""
    return all(
        not rank.collectives
        or rank.collectives[0]["id"] == 0
        or rank.collectives[0]["time"] < begin["time"]
        for rank, (begin, _) in zip(ranks, evaluation, strict=True)
    )


def _is_combined(ranks: list[Rank], evaluation: list) -> bool:
    """Return True if a collective may have combined the results before training went on."""
    return any(_combining(rank, each) for rank, each in zip(ranks, evaluation, strict=True))


def _surely_combined(ranks: list[Rank], evaluation: list) -> bool:
    """Return True unless all collectives come from outside of the function with the evaluation.

    They may combine the results that the function has returned, but just as well something else.
    """
    for rank, each in zip(ranks, evaluation, strict=True):
        line = each[0]["line"]
        calls = _combining(rank, each)
        if line and calls and not any([line[0], line[2]] in call["functions"] for call in calls):
            return False
    return True


def _combining(rank: Rank, evaluation: tuple[dict, float]) -> list[dict]:
    """Return the collectives that may have combined the results before training went on."""
    begin, end = evaluation
    return [
        call
        for call in rank.collectives
        if begin["time"] <= call["time"] <= end
        and "barrier" not in call["name"]
        and not OF_LIBRARIES.search(call["caller"])
    ]


def _is_written(ranks: list[Rank], evaluation: list) -> bool:
    """Return True if a rank other than the first one has written a file before training went on.

    Perhaps the results of its share, which a rank or another program combines later.
    """
    return any(
        begin["time"] <= event["time"] <= end and event["how"] in CHANGES
        for rank, (begin, end) in list(zip(ranks, evaluation, strict=True))[1:]
        for event in rank.of("file")
    )


def _is_reported(ranks: list[Rank], evaluation: list) -> bool:
    """Return True if some ranks, but not all, have printed a number before training went on."""
    printed = [
        any(begin["time"] <= event["time"] <= end for event in rank.of("printed"))
        for rank, (begin, end) in zip(ranks, evaluation, strict=True)
    ]
    return any(printed) and not all(printed)


def _passed_on_otherwise(evidence: Evidence) -> bool:
    """Return True if the ranks may combine results in a way that the recorder does not see."""
    is_recorded = any(rank.collectives for rank in evidence.ranks)
    return any(evidence.counts("shared")) or evidence.has_messages or not is_recorded

"""Does each metric contain every sample of all ranks exactly once?"""

import ast
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.ranks import Rank
from accel_demo.lab.audit.result import NOTE, WARNING, Finding, NotChecked, text_of
from accel_demo.wording import counted

PAGE = "30_who_saw_which_sample"
OF_PASSES = ("pass", "batch", "pass end")  # kinds of events
CHANGES = ("write", "save", "rename", "append")  # of a file
# Callers of collectives that combine no results: replicas, shards, random states, checkpoints
OF_LIBRARIES = re.compile(
    r"/torch/(nn/parallel|distributed/(fsdp|_composable|optim|checkpoint))/"
    r"|/accelerate/(utils/random|data_loader)\.py$"
)
# Names in a script that may remove the padding itself
OF_PADDING = re.compile("uniq|dedup|duplic|remainder|seen|padded|(?<!attention_)mask", re.I)
OF_METRICS = re.compile("loss|acc(?!el)|correct|right|score|metric|error", re.I)


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    evaluations = [_evaluations(rank) for rank in evidence.ranks]
    common = set.intersection(*map(set, evaluations))
    gathers = [_gathers(rank) for rank in evidence.ranks]
    if not common and not any(gathers):
        raise NotChecked("no evaluation of a loader that is divided between the ranks was seen")
    yield from _padded(evidence.ranks, gathers)
    by_loader: dict[int, list] = {}
    for key in sorted(common):
        each = [passes[key] for passes in evaluations]
        if len({str(begin["line"]) for begin, _ in each}) == 1:
            by_loader.setdefault(key[0], []).append(each)
    unknown = False
    for evaluations in by_loader.values():
        known = [each for each in evaluations if _is_known(evidence.ranks, each)]
        unknown |= len(known) < len(evaluations)
        if known and (finding := _of_shares(evidence, known)):
            begins = [begin for begin, _ in known[0]]
            for rank, begin in zip(evidence.ranks, begins, strict=True):
                finding.add_place(begin["line"], rank.number)
            yield finding
    if unknown:
        raise NotChecked("there were more collectives than the Flight Recorder stores")


def _of_shares(evidence: Evidence, evaluations: list) -> Finding | None:
    """Report that the results of a loader are never combined, or always with repeated samples.

    `evaluations` are those of one loader, each a list with the result of `_evaluations` per rank.
    """
    begin, _ = evaluations[0][0]
    combined = [_is_combined(evidence.ranks, each) for each in evaluations]
    written = [_is_written(evidence.ranks, each) for each in evaluations]
    if not any(combined + written) and not _passed_on_otherwise(evidence):
        return Finding(
            WARNING,
            "metrics",
            f"Each rank evaluates its own share of {begin['samples'] or 'the'} samples, but no "
            "collective combines the results: each rank has only the metric of its own share.",
            "Add up the results of all ranks, for example with dist.all_reduce or "
            "accelerator.gather_for_metrics, before you use the metric.",
            PAGE,
        )
    is_padded = begin["sampler"] == "DistributedSampler" and begin["padded"] and begin["line"]
    if all(combined) and is_padded and not _may_drop_padding(begin["line"][0]):
        return Finding(
            NOTE,
            "metrics",
            f"DistributedSampler repeats {counted(begin['padded'], 'sample')} in this evaluation, "
            "so that all ranks have equally many: a metric of all ranks counts them twice.",
            "Put the results of all ranks back into the sampler's order, and keep as many as the "
            "dataset has samples.",
            PAGE,
        )
    return None


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
    return any(
        begin["time"] <= call["time"] <= end
        and "barrier" not in call["name"]
        and not OF_LIBRARIES.search(call["caller"])
        for rank, (begin, end) in zip(ranks, evaluation, strict=True)
        for call in rank.collectives
    )


def _is_written(ranks: list[Rank], evaluation: list) -> bool:
    """Return True if a rank other than the first one has written a file before training went on.

    Perhaps the results of its share, which a rank or another program combines later.
    """
    return any(
        begin["time"] <= event["time"] <= end and event["how"] in CHANGES
        for rank, (begin, end) in list(zip(ranks, evaluation, strict=True))[1:]
        for event in rank.of("file")
    )


def _passed_on_otherwise(evidence: Evidence) -> bool:
    """Return True if the ranks may combine results in a way that the recorder does not see."""
    is_recorded = any(rank.collectives for rank in evidence.ranks)
    return any(evidence.counts("shared")) or evidence.has_messages or not is_recorded


def _gathers(rank: Rank) -> list[tuple[dict, dict]]:
    """Return the calls that gather results in passes that are not for training, and the passes.

    Only `gather_for_metrics` is certainly about a metric. Other calls count if a model was set to
    `eval` since the last backward pass.
    """
    passes = {(each["loader"], each["number"]): each for each in rank.of("pass")}
    latest, read, is_set, found = None, 0, False, []
    for event in rank.events:
        if event["kind"] in ("batch", "pass end"):
            latest = passes.get((event["loader"], event["number"]))
            read = event.get("batches", 0)  # known at the end
        elif event["kind"] in ("eval", "backward"):
            is_set = event["kind"] == "eval"
        elif event["kind"] == "gathered" and latest and latest["padded"]:
            is_metric = is_set or event["name"] == "gather_for_metrics"
            is_prepared = latest["sampler"] != "DistributedSampler"
            if latest["loader"] not in rank.training_passes and is_metric and is_prepared:
                found.append((event, latest | {"read": read}))
    return found


def _padded(ranks: list[Rank], gathers: list[list]) -> Iterator[Finding]:
    """Report results of padding: in the last batch, or in all batches that are gathered at once."""
    lines: dict[tuple, tuple[dict, dict, list]] = {}
    for rank, calls in zip(ranks, gathers, strict=True):
        for event, about in calls:
            key = event["name"], str(event["line"])
            if _counts_padding(event, about) and not _may_drop_padding(event["line"][0]):
                lines.setdefault(key, (event, about, []))[2].append((event["line"], rank.number))
    for event, about, places in lines.values():
        if len(places) < len(ranks):
            continue
        name, padding = event["name"], counted(about["padded"], "padded sample")
        if event["loader"] != about["loader"]:
            sentence = (
                f"accelerator.{name} is called after the loop, so it also returns the results of "
                f"{padding}, which are counted twice."
            )
            cure = "Call accelerator.gather_for_metrics in the loop, after each batch."
        elif all(math.prod(size) > 1 for size in event["sizes"]):
            sentence = (
                f"accelerator.{name} also returns the results of {padding} in the last batch, "
                "which are counted twice."
            )
            cure = "Call accelerator.gather_for_metrics instead, which drops them."
        else:
            sentence = (
                f"accelerator.{name} receives one number per batch. In the last batch, these "
                f"numbers contain {padding}, which can no longer be dropped."
            )
            cure = (
                "Pass one number per sample to accelerator.gather_for_metrics, for example the "
                'loss with reduction="none", and compute the mean afterwards.'
            )
        finding = Finding(WARNING, "metrics", sentence, cure, PAGE)
        for line, rank in places:
            finding.add_place(line, rank)
        yield finding


def _counts_padding(event: dict, about: dict) -> bool:
    """Return True if the results that are gathered are known to contain those of the padding."""
    lengths, share = {size[0] if size else 1 for size in event["sizes"]}, about["share"]
    if share == 1 or not lengths:
        return False
    if event["loader"] != about["loader"]:  # after the loop
        return event["name"] != "reduce" and lengths == {share * about["read"]}
    if not event["is_last"]:
        return False
    if event["name"] == "gather_for_metrics":
        return 1 in lengths and lengths <= {1, share}
    if event["name"] == "gather" and lengths == {share}:
        return True
    is_number = all(math.prod(size) == 1 for size in event["sizes"])
    return is_number and bool(OF_METRICS.search(text_of(event["line"])))


@cache
def _may_drop_padding(path: str) -> bool:
    """Return True if a file may itself take care that no sample is counted twice.

    For example, it slices the results to the length of the dataset, or stores them by an index.
    """
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, ValueError, SyntaxError):
        return True
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None)))
        if isinstance(name, str) and OF_PADDING.search(name):
            return True
        if isinstance(node, ast.Subscript) and _selects(node):
            return True
    return False


def _selects(node: ast.Subscript) -> bool:
    """Return True for `results[:number]` and `results[index] = …`, with a number that varies."""
    place = node.slice
    if isinstance(place, ast.Slice):
        is_constant = isinstance(place.upper, ast.Constant | ast.UnaryOp | None)
        return place.lower is None and not is_constant
    return isinstance(node.ctx, ast.Store) and not isinstance(place, ast.Constant)

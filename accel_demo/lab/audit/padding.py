"""Find results of padded samples that a script gathers with Accelerate."""

import math
import re
from collections.abc import Iterator
from linecache import getlines

from accel_demo.lab.audit.result import NOTE, WARNING, Finding
from accel_demo.lab.observed.ranks import Rank
from accel_demo.wording import counted

PAGE = "30_who_saw_which_sample"
DROPS = re.compile(r"\[ *: *[A-Za-z_(]|unique|\bset\(")  # may drop it: [:len(dataset)]


def gathers_of(rank: Rank) -> list[tuple[dict, dict]]:
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


def padded_results(ranks: list[Rank], gathers: list[list]) -> Iterator[Finding]:
    """Report results of padding: in the last batch, or in all batches that are gathered at once."""
    lines: dict[tuple, tuple[dict, dict, list]] = {}
    for rank, calls in zip(ranks, gathers, strict=True):
        for event, about in calls:
            key = event["name"], str(event["line"])
            if _counts_padding(event, about):
                lines.setdefault(key, (event, about, []))[2].append((event["line"], rank.number))
    for event, about, places in lines.values():
        if len(places) < len(ranks):
            continue
        name, padding = event["name"], counted(about["padded"], "padded sample")
        verdict, counted_twice = WARNING, "which count twice."
        if event["has_ids"] or any(map(DROPS.search, getlines(event["line"][0]))):
            verdict, counted_twice = NOTE, "which count twice, unless the script drops them."
        if event["loader"] != about["loader"]:
            sentence = (
                f"accelerator.{name} is called after the loop, so it also returns the results of "
                f"{padding}, {counted_twice}"
            )
            cure = "Call accelerator.gather_for_metrics in the loop, after each batch."
        elif all(math.prod(size) > 1 for size in event["sizes"]):
            sentence = (
                f"accelerator.{name} also returns the results of {padding} in the last batch, "
                f"{counted_twice}"
            )
            cure = "Call accelerator.gather_for_metrics instead, which drops them."
        else:
            verdict = WARNING
            sentence = (
                f"accelerator.{name} receives one number per batch. In the last batch, these "
                f"numbers contain {padding}, which can no longer be dropped."
            )
            cure = (
                "Pass one number per sample to accelerator.gather_for_metrics, for example the "
                'loss with reduction="none", and compute the mean afterwards.'
            )
        finding = Finding(verdict, "metrics", sentence, cure, PAGE)
        for line, rank in places:
            finding.add_place(line, rank)
        yield finding


def _counts_padding(event: dict, about: dict) -> bool:
    """Return True if the results that are gathered are known to contain those of the padding."""
    lengths, share = {size[0] if size else 1 for size in event["sizes"]}, about["share"]
    if share == 1 or not lengths:
        return False
    if event["loader"] != about["loader"]:  # after the loop
        return lengths == {share * about["read"]}
    if not event["is_last"]:
        return False
    if event["name"] == "gather_for_metrics":
        return 1 in lengths and lengths <= {1, share}
    return lengths == {share}

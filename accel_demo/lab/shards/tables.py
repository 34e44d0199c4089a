"""Format the result of `accel-demo shards` as text."""

import shlex
import string
from collections.abc import Sequence

from accel_demo.lab.observed.observation import processes_in_words
from accel_demo.lab.shards.own import OwnLoader, OwnShardsResult
from accel_demo.lab.shards.result import EpochReads, LoaderReads, ShardsResult, readers_of
from accel_demo.show import table
from accel_demo.wording import counted

MARKS = string.digits + string.ascii_lowercase  # rank 10 is shown as "a", rank 11 as "b"
WIDEST_MAP = 64  # samples; with more samples, the map would make the table too wide
LEGEND = "A digit is the rank that read the sample; `*`: read more than once; `-`: never."


def headline(result: ShardsResult) -> str:
    """Describe the processes, and the settings that are the same for all loaders, in one line."""
    settings = result.loaders[0].settings
    batch_size = settings.batch_size // (result.processes if settings.split_batches else 1)
    words = [counted(settings.samples, "sample"), f"batches of {batch_size} per process"]
    words += [] if settings.shuffle else ["not shuffled"]
    words += [] if settings.set_epoch else ["set_epoch is never called"]
    words += ["drop_last"] if settings.drop_last else []
    processes = counted(result.processes, "connected process")
    return f"{processes} on {result.device}: {', '.join(words)}"


def headline_of_script(result: OwnShardsResult, seen: int) -> str:
    """Describe the processes of a script, `seen` in all, and its command in one line."""
    processes = processes_in_words(result.processes, seen)
    return f"{processes}: {shlex.join(result.command_line)}"


def describe(loader: OwnLoader) -> str:
    """Return the place of a loader of the reader's script, and what is known of its samples."""
    samples = counted(loader.samples, "sample")
    if loader.by_content:
        samples += " (told apart by content, and numbered in the order in which they came)"
    text = f"{loader.name}\n{samples}, {'' if loader.trains else 'not '}used for training"
    if loader.ended_after:
        text += f", of the first {loader.ended_after} batches of a rank: the others were not read"
    if any(len(counts) > 1 for counts in loader.by_worker):
        parts = [", ".join(map(str, counts)) for counts in loader.by_worker]
        numbered = [f"rank {rank}: {part}" for rank, part in enumerate(parts) if part]
        text += f"\nsamples by loader worker in epoch 1: {'; '.join(numbered)}"
    if loader.is_dispatched:
        text += (
            "\nAccelerate reads this loader on rank 0 for all ranks. What only the stream of "
            "another rank would yield is unknown here, and never read."
        )
    return text


def reading_table(loaders: Sequence[LoaderReads | OwnLoader], with_names: bool = True) -> str:
    """Return a table with a row per loader and epoch.

    All loaders must have the same number of samples.
    """
    samples, rows = loaders[0].samples, []
    has_map = samples <= WIDEST_MAP and len(loaders[0].epochs[0].batches) <= len(MARKS)
    for loader in loaders:
        for epoch in loader.epochs:
            same = {None: "–", True: "yes", False: "no"}[epoch.same_order_as_epoch_1]
            batches = ", ".join(str(len(batches)) for batches in epoch.batches)
            row = [loader.name if epoch.epoch == 1 else ""] if with_names else []
            row += [epoch.epoch]
            row += [f"`{_map(epoch, samples)}`"] if has_map else []
            never = "unknown" if epoch.never is None else len(epoch.never)
            never = never if epoch.is_complete else "not read to its end"
            row += [len(epoch.more_than_once), never, batches, same]
            rows.append(row)
    head = ["method", "epoch"] if with_names else ["epoch"]
    head += [f"who read sample 0 … {samples - 1}"] if has_map else []
    head += ["more than once", "never", "batches by rank", "same order as epoch 1"]
    return table(head, rows) + (f"\n\n{LEGEND}" if has_map else "")


def _map(epoch: EpochReads, samples: int) -> str:
    """Return a character per sample: a rank, "*" (read more than once), or "-" (never read)."""
    readers = readers_of(epoch.batches, samples)
    return "".join("*" if ranks[1:] else MARKS[ranks[0]] if ranks else "-" for ranks in readers)


def metric_table(loaders: list[LoaderReads]) -> str:
    """Return a table of how many samples `gather` and `gather_for_metrics` return in an epoch."""
    rows = []
    for loader in loaders:
        row = [loader.name, loader.samples]
        for ids in (loader.gather, loader.gather_for_metrics):
            row.append("–" if ids is None else f"{len(ids)} ({len(set(ids))} different)")
        rows.append(row)
    return table(["method", "samples", "`gather`", "`gather_for_metrics`"], rows)

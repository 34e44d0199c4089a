"""Format the result of `accel-demo shards` as text."""

import string

from accel_demo.anatomy.shards import Batches
from accel_demo.lab.shards.reading import EpochReads, LoaderReads, ShardsResult, readers_of
from accel_demo.show import table
from accel_demo.wording import counted

MARKS = string.digits + string.ascii_lowercase  # rank 10 is shown as "a", rank 11 as "b"
WIDEST_MAP = 64  # samples; with more samples, the map would make the table too wide


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


def reading_table(loaders: list[LoaderReads]) -> str:
    """Return a table with one row per loader and epoch."""
    samples, rows = loaders[0].settings.samples, []
    has_map = samples <= WIDEST_MAP and len(loaders[0].epochs[0].batches) <= len(MARKS)
    for loader in loaders:
        for epoch in loader.epochs:
            same = {None: "–", True: "yes", False: "no"}[epoch.same_order_as_epoch_1]
            batches = ", ".join(str(len(batches)) for batches in epoch.batches)
            row = [loader.settings.name if epoch.epoch == 1 else "", epoch.epoch]
            row += [f"`{_map(epoch, samples)}`"] if has_map else []
            row += [len(epoch.more_than_once), len(epoch.never), batches, same]
            rows.append(row)
    head = ["method", "epoch", f"who read sample 0 … {samples - 1}"][: 3 if has_map else 2]
    head += ["more than once", "never", "batches by rank", "same order as epoch 1"]
    legend = "\n\nA digit is the rank that read the sample; `*`: read more than once; `-`: never."
    return table(head, rows) + (legend if has_map else "")


def _map(epoch: EpochReads, samples: int) -> str:
    """Return a character per sample: a rank, "*" (read more than once), or "-" (never read)."""
    readers = readers_of(epoch.batches, samples)
    return "".join("*" if ranks[1:] else MARKS[ranks[0]] if ranks else "-" for ranks in readers)


def metric_table(loaders: list[LoaderReads]) -> str:
    """Return a table of how many samples `gather` and `gather_for_metrics` return in an epoch."""
    rows = []
    for loader in loaders:
        row = [loader.settings.name, loader.settings.samples]
        for ids in (loader.gather, loader.gather_for_metrics):
            row.append("–" if ids is None else f"{len(ids)} ({len(set(ids))} different)")
        rows.append(row)
    return table(["method", "samples", "`gather`", "`gather_for_metrics`"], rows)


def explain_uneven_batches(ranks: list[Batches]) -> str:
    """Explain why the ranks' batches cannot be gathered, and what would happen in training."""
    lengths = [len(batches) for batches in ranks]
    most, fewest = max(lengths), min(lengths)
    if most > fewest:
        longest, shortest = lengths.index(most), lengths.index(fewest)
        return (
            f"rank {longest} has more batches ({most}) than rank {shortest} ({fewest}). In "
            f"training the all-reduce of batch {fewest + 1} on rank {longest} would wait for rank "
            f"{shortest} until the time limit of the process group, and so would `gather`. Keep "
            "even_batches=True, or train with drop_last=True."
        )
    sizes = zip(*([len(batch) for batch in batches] for batches in ranks), strict=True)
    number, uneven = next(item for item in enumerate(sizes, start=1) if len(set(item[1])) > 1)
    return (
        f"batch {number} has {', '.join(map(str, uneven))} samples by rank. Training would "
        "continue, but a sample in a smaller batch would have more weight in the mean over ranks. "
        "`gather` requires equal shapes. Otherwise the result is undefined: gloo usually raises an "
        "error, and NCCL may also hang or return wrong numbers."
    )

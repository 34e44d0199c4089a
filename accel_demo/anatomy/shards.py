"""Which sample does each rank read? Data-level parallelism, sample by sample.

python -m accel_demo.anatomy.shards --processes 2 --samples 11

DistributedDataParallel does not split the batch: whoever deals the samples out does, and each way
deals differently. In every way each sample is read once an epoch, but for those that are read
twice, or left out, so that all ranks have the same number of batches.
"""

import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.anatomy.flags import command_line, read
from accel_demo.batches import BatchShardSampler
from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.connect import gather_objects, use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save, table

SEED = 0
WAYS = {
    "DistributedSampler": "deals single samples, pads the dataset",
    "Accelerate": "deals whole batches, pads the last ones",
    "Accelerate, drop_last": "deals whole batches, leaves the last ones out",
    "train_ddp.py": "deals as Accelerate with drop_last does",
}


def who_reads_what(way: str, samples: int, batch_size: int, epoch: int = 0) -> list[list[int]]:
    """The sample ids of each batch this rank reads in an epoch, dealt out in one of the `WAYS`.

    `batch_size` is per process. Accelerate shuffles by the same seed on every rank.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
    loader: Any
    if way.startswith("Accelerate"):
        loader = loader_of_accelerate(samples, batch_size, drop_last=way.endswith("drop_last"))
        loader.set_epoch(epoch)
    elif way == "DistributedSampler":
        loader = loader_of_torch(samples, batch_size)
        loader.sampler.set_epoch(epoch)
    else:
        ids: Any = range(samples)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        sampler = BatchShardSampler(ids, batch_size, world_size, rank, SEED)
        sampler.set_epoch(epoch)
        loader = DataLoader(ids, batch_size, sampler=sampler)
    return [batch.tolist() for batch in loader]


def loader_of_torch(
    samples: int, batch_size: int, shuffle: bool = True, drop_last: bool = False
) -> DataLoader:
    """Sample ids, dealt out by `DistributedSampler`. `batch_size` is per process.

    `drop_last` is for both: the sampler drops what does not go round, the loader a smaller batch.
    """
    ids: Any = range(samples)
    sampler = DistributedSampler(ids, shuffle=shuffle, seed=SEED, drop_last=drop_last)
    return DataLoader(ids, batch_size, sampler=sampler, drop_last=drop_last)


def loader_of_accelerate(
    samples: int, batch_size: int, shuffle: bool = True, drop_last: bool = False, **dealing
) -> DataLoader:
    """Sample ids, dealt out by Accelerate; `dealing` is what `DataLoaderConfiguration` takes."""
    dealing = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED, **dealing)
    accelerator = Accelerator(cpu=use_cpu(), dataloader_config=dealing)
    ids: Any = range(samples)
    loader = DataLoader(ids, batch_size, shuffle=shuffle, drop_last=drop_last)
    return accelerator.prepare(loader)


def in_words(ranks: list[list[list[int]]], samples: int) -> str:
    """How often the samples have been read in the epoch."""
    times = Counter(sample for batches in ranks for batch in batches for sample in batch)
    again = sum(count > 1 for count in times.values())
    missing = samples - len(times)
    parts = [f"{again} twice{' or more' if max(times.values()) > 2 else ''}"] if again else []
    parts += [f"{missing} not at all"] if missing else []
    return ", ".join(parts) or "each once"


def draw(found: dict[str, list[list[list[int]]]], samples: int, path) -> None:
    """One panel for each way: sample ids to the right, a mark in the row of the rank that reads it.

    The number in the mark, where it has room, is the batch of that rank it comes in.
    """
    ranks = max(map(len, found.values()))
    width = min(18, max(9, 1.5 + 0.25 * samples))  # inches; a smaller mark has no room for a number
    room = 72 * (width - 1.5) / samples  # points
    figure = new_figure(width, 0.9 + (0.55 + 0.35 * ranks) * len(found))
    panels = figure.subplots(len(found), 1, sharex=True)
    for axis, (way, ranks) in zip(panels, found.items(), strict=True):
        for rank, batches in enumerate(ranks):
            for number, batch in enumerate(batches):
                for sample in batch:
                    size = min(15, 0.8 * room)
                    axis.plot(sample, rank, "s", markersize=size, color=COLOURS[rank % 6])
                    if room >= 18:
                        axis.text(sample, rank, number, ha="center", va="center", color="white")
        axis.set_title(f"{way}: {in_words(ranks, samples)}", loc="left", fontsize=10)
        axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axis.set_ylim(len(ranks) - 0.4, -0.6)
        axis.spines[["top", "right"]].set_visible(False)
    step = 1 if room >= 18 else 10 * math.ceil(0.9 * len(str(samples)) / room)
    panels[-1].set_xticks(range(0, samples, step))
    in_marks = " (the number in a square: in which batch of its rank)" if room >= 18 else ""
    panels[-1].set_xlabel(f"sample{in_marks}")
    save(figure, path)


def show(device: torch.device, options) -> None:
    """Print who reads what in each of the `WAYS`, and draw it."""
    found = {}
    for way in WAYS:
        found[way] = gather_objects(who_reads_what(way, options.samples, options.batch_size))
    if dist.get_rank() > 0:
        return
    rows = []
    for way, ranks in found.items():
        for rank, batches in enumerate(ranks):
            dealt = [f"{way}: {WAYS[way]}", in_words(ranks, options.samples)]
            shown = " · ".join(" ".join(map(str, batch)) for batch in batches)
            rows.append([*(dealt if rank == 0 else ["", ""]), str(rank), shown])
    print(table(["way", "samples read", "rank", "its batches"], rows))
    if options.plot:
        draw(found, options.samples, options.plot)


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__, processes=2)
    help = "how many samples the dataset has (default: 11)"
    parser.add_argument("--samples", type=int, default=11, metavar="N", help=help)
    help = "samples per process and batch (default: 2)"
    parser.add_argument("--batch-size", type=int, default=2, metavar="N", help=help)
    options = read(parser, arguments)
    if options.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.samples < options.processes * options.batch_size:
        raise UserError(
            f"--samples must be at least {options.processes * options.batch_size}, a batch of "
            f"{options.batch_size} for each process ({options.processes}), got {options.samples}"
        )
    run_in_group(show, options.processes, options)


if __name__ == "__main__":
    with one_line_errors():
        main()

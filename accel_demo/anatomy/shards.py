"""Show which samples each rank reads, with four methods of sharding an epoch.

python -m accel_demo.anatomy.shards
python -m accel_demo.anatomy.shards --processes 3 --samples 20 --plot shards.svg

DistributedDataParallel does not split batches. A sampler or Accelerate decides which rank reads
which sample. All ranks must have the same number of batches, so some samples may be read twice or
not at all.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.batches import BatchShardSampler
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table

SEED = 0
METHODS = {
    "DistributedSampler": "deals single samples, pads the dataset",
    "Accelerate": "deals whole batches, pads the last ones",
    "Accelerate, drop_last": "deals whole batches, drops the last ones",
    "train_ddp.py": "deals like Accelerate with drop_last",
}
Batches = list[list[int]]  # one rank's batches in an epoch, as lists of sample ids


def who_reads_what(method: str, samples: int, batch_size: int, epoch: int = 0) -> Batches:
    """Return the batches that this rank reads in one epoch with `method`, as lists of sample ids.

    `batch_size` is per process. Accelerate shuffles with the same seed on every rank.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    loader: Any
    if method.startswith("Accelerate"):
        loader = loader_of_accelerate(samples, batch_size, drop_last=method.endswith("drop_last"))
        loader.set_epoch(epoch)
    elif method == "DistributedSampler":
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
    """Return a loader of sample ids with a `DistributedSampler`. `batch_size` is per process.

    If `drop_last` is True, the sampler drops samples that do not divide evenly among the ranks, and
    the loader drops an incomplete last batch.
    """
    ids: Any = range(samples)
    sampler = DistributedSampler(ids, shuffle=shuffle, seed=SEED, drop_last=drop_last)
    return DataLoader(ids, batch_size, sampler=sampler, drop_last=drop_last)


def loader_of_accelerate(
    samples: int, batch_size: int, shuffle: bool = True, drop_last: bool = False, **options
) -> DataLoader:
    """Return Accelerate's loader of sample ids. Pass `options` to `DataLoaderConfiguration`."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED, **options)
    accelerator = Accelerator(cpu=use_cpu(), dataloader_config=config)
    ids: Any = range(samples)
    loader = DataLoader(ids, batch_size, shuffle=shuffle, drop_last=drop_last)
    return accelerator.prepare(loader)


def in_words(ranks: list[Batches], samples: int) -> str:
    """Describe how often the samples of an epoch were read, for example as "each once"."""
    reads = Counter(sample for batches in ranks for batch in batches for sample in batch)
    repeated = sum(count > 1 for count in reads.values())
    missing = samples - len(reads)
    parts = [f"{repeated} twice{' or more' * (max(reads.values()) > 2)}"] if repeated else []
    parts += [f"{missing} not at all"] if missing else []
    return ", ".join(parts) or "each once"


def draw(ranks_by_method: dict[str, list[Batches]], samples: int, path: Path) -> None:
    """For each method, draw a row for each rank, with a square for each sample that the rank reads.

    If there is room, each square shows the number of the rank's batch that contains the sample.
    """
    rows = max(map(len, ranks_by_method.values()))
    width = min(18, max(9, 1.5 + 0.25 * samples))  # inches
    room = 72 * (width - 1.5) / samples  # points per sample
    figure = new_figure(width, 0.9 + (0.55 + 0.35 * rows) * len(ranks_by_method))
    panels = figure.subplots(len(ranks_by_method), 1, sharex=True)
    for axis, (method, ranks) in zip(panels, ranks_by_method.items(), strict=True):
        for rank, batches in enumerate(ranks):
            for number, batch in enumerate(batches):
                for sample in batch:
                    size = min(15, 0.8 * room)
                    axis.plot(sample, rank, "s", markersize=size, color=COLORS[rank % 6])
                    if room >= 18:
                        axis.text(sample, rank, number, ha="center", va="center", color="white")
        axis.set_title(f"{method}: {in_words(ranks, samples)}", loc="left", fontsize=10)
        axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axis.set_ylim(len(ranks) - 0.4, -0.6)
        axis.spines[["top", "right"]].set_visible(False)
    step = 1 if room >= 18 else 10 * math.ceil(0.9 * len(str(samples)) / room)
    panels[-1].set_xticks(range(0, samples, step))
    in_marks = " (the number in a square: the batch of its rank)" if room >= 18 else ""
    panels[-1].set_xlabel(f"sample{in_marks}")
    save(figure, path)


def show(device: torch.device, options) -> None:
    """Print which rank reads which samples with each method, and draw the result."""
    sizes = options.samples, options.batch_size
    ranks_by_method = {m: gather_objects(who_reads_what(m, *sizes)) for m in METHODS}
    if dist.get_rank() > 0:
        return
    rows = []
    for method, ranks in ranks_by_method.items():
        labels = [f"{method}: {METHODS[method]}", in_words(ranks, options.samples)]
        for rank, batches in enumerate(ranks):
            shown = " · ".join(" ".join(map(str, batch)) for batch in batches)
            rows.append([*(["", ""] if rank else labels), str(rank), shown])
    print(table(["method", "samples read", "rank", "batches"], rows))
    if options.plot:
        draw(ranks_by_method, options.samples, options.plot)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(__doc__, plot=True, processes=2)
    parser.add_option("--samples", 11, "how many samples the dataset has")
    parser.add_option("--batch-size", 2, "samples per batch on each process", least=1)
    options = parser.parse_args(arguments)
    if options.samples < options.processes * options.batch_size:
        raise UserError(
            f"--samples must be at least {options.processes * options.batch_size}, a batch of "
            f"{options.batch_size} for each process ({options.processes}), got {options.samples}"
        )
    run_in_group(show, options.processes, options)


if __name__ == "__main__":
    with one_line_errors():
        main()

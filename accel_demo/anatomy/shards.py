"""Shard the samples of an epoch among the ranks, with four methods.

`accel-demo shards` prints and draws which samples each rank reads.

DistributedDataParallel does not split batches. A sampler or Accelerate decides which rank reads
which sample. All ranks must have the same number of batches, so some samples may be read twice or
not at all.
"""

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.batches import BatchShardSampler
from accel_demo.processes.devices import use_cpu

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

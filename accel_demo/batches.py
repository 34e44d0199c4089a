"""Shard the samples of each epoch across the processes, and resume an interrupted epoch."""

import sys
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.config import TrainConfig
from accel_demo.processes.launch import start_server
from accel_demo.processes.signals import ignore_signals

PRELOADED = ("accelerate", "torch.utils.data")  # slow to import, and needed by every loader worker


def loader_options(config: TrainConfig, device: torch.device) -> dict:
    """Return the keyword arguments shared by all DataLoaders in a run.

    A DataLoader draws the seed of its workers at the start of each epoch. We give it a separate
    generator, because a run that is resumed in the middle of an epoch draws one extra number. With
    the global generator, the extra draw would change all later dropout masks.

    The generator's seed differs between ranks, so that their workers draw different numbers. Do not
    pass `shuffle=True`: then the sampler would use this generator, too, and Accelerate's seedable
    sampler resets it in each epoch to a seed that is the same on all ranks.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "collate_fn": _as_batch,
        "generator": torch.Generator().manual_seed(config.seed + rank),
        "worker_init_fn": ignore_signals,
        "num_workers": config.num_workers,
        "pin_memory": device.type == "cuda",
        **(safe_start_of_workers() if config.num_workers else {}),
    }


class BatchShardSampler(DistributedSampler):
    """A `DistributedSampler` that assigns whole batches to ranks, as Accelerate does.

    Batch k of the shuffled epoch is assigned to rank `k % world_size`. If the last batches are too
    few or too small to give every rank a full batch, they are dropped. PyTorch's
    `DistributedSampler` assigns individual samples instead. With its batches, the trained weights
    would not match Accelerate's bit for bit.
    """

    def __init__(self, dataset, batch_size: int, num_replicas: int, rank: int, seed: int):
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)
        self.batch_size, self.samples = batch_size, len(dataset)
        self.num_samples = self.samples // (batch_size * num_replicas) * batch_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        batches = torch.randperm(self.samples, generator=generator).split(self.batch_size)
        return iter(torch.cat(batches[self.rank :: self.num_replicas])[: self.num_samples].tolist())


def skip_first_batches(loader: DataLoader, done: int, options: dict) -> DataLoader:
    """Return a loader that skips the first `done` batches of the epoch without reading them."""
    return DataLoader(loader.dataset, batch_sampler=_Rest(loader.batch_sampler, done), **options)


class _Rest:
    """A batch sampler that skips the first `done` batches of another batch sampler."""

    def __init__(self, batch_sampler, done: int):
        self.batch_sampler, self.done = batch_sampler, done

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.done, None)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.done


def safe_start_of_workers() -> dict:
    """Return DataLoader options that prevent workers from hanging when they start.

    By default, workers are forked from this process. Before Python 3.11.10, a worker hangs if
    another thread starts to run Python code during the fork, because the worker inherits a lock
    that is never released. Gloo's threads run Python code shortly after each collective, to release
    its tensors. So if a process group exists, we fork the workers from a server without such
    threads, as Python 3.14 does by default. The server imports the modules `PRELOADED` once. The
    workers block the stop signals, which must not kill them before the step is finished.
    Source: https://github.com/python/cpython/issues/112275
    """
    if sys.version_info >= (3, 11, 10) or sys.platform != "linux" or not dist.is_initialized():
        return {}
    start_server(PRELOADED)
    return {"multiprocessing_context": "forkserver"}


def _as_batch(batch):
    """Return the batch unchanged, because `ImageSet.__getitems__` has already collated it."""
    return batch

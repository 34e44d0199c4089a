"""Read all epochs on every rank, and gather the samples of one epoch as a metric would."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from accel_demo.anatomy.shards import loader_of_accelerate, loader_of_torch
from accel_demo.lab.shards.result import (
    TORCH,
    Batches,
    LoaderReads,
    LoaderSettings,
    ShardsResult,
    epoch_reads,
)
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.devices import use_cpu
from accel_demo.progress_bar import ProgressBar


def read_all(device: torch.device, loaders: list[LoaderSettings]) -> ShardsResult:
    """Return which samples each rank reads. All ranks must call this, and get the same result."""
    total = sum(settings.epochs for settings in loaders)
    with ProgressBar("reading", "epoch", total=total, is_shown=dist.get_rank() == 0) as bar:
        reads = [read_with(device, settings, bar) for settings in loaders]
    return ShardsResult(dist.get_world_size(), f"{device.type} ({dist.get_backend()})", reads)


def read_with(device: torch.device, settings: LoaderSettings, bar: ProgressBar) -> LoaderReads:
    """Read all epochs with one loader on this rank, and collect the batches of all ranks."""
    epochs = list(zip(*gather_objects(read_epochs(settings, bar)), strict=True))
    sizes = [[len(batch) for batch in batches] for batches in epochs[0]]
    are_even = all(rank_sizes == sizes[0] for rank_sizes in sizes)
    gathered = gather_an_epoch(device, settings) if are_even else {}
    reads = [
        epoch_reads(number, ranks, epochs[0], settings.samples)
        for number, ranks in enumerate(epochs, start=1)
    ]
    return LoaderReads(settings.name, settings.samples, settings, reads, **gathered)


def read_epochs(settings: LoaderSettings, bar: ProgressBar) -> list[Batches]:
    """Return the batches that this rank reads in each epoch.

    Until all batches are read, only the loader itself may call collectives. Others could hang,
    because the ranks may have different numbers of batches.
    """
    loader: Any = make_loader(settings)
    epochs = []
    for epoch in range(settings.epochs):
        if settings.set_epoch:
            (loader.sampler if settings.method == TORCH else loader).set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
        bar.update()
    return epochs


def make_loader(settings: LoaderSettings) -> DataLoader:
    """Return a new loader for this rank's samples."""
    common = {"shuffle": settings.shuffle, "drop_last": settings.drop_last}
    if settings.method == TORCH:
        return loader_of_torch(settings.samples, settings.batch_size, **common)
    return loader_of_accelerate(
        settings.samples,
        settings.batch_size,
        **common,
        split_batches=settings.split_batches,
        dispatch_batches=settings.dispatch_batches or None,  # None is Accelerate's default
        even_batches=settings.even_batches,
    )


def gather_an_epoch(device: torch.device, settings: LoaderSettings) -> dict[str, list[int]]:
    """Return the sample ids that `gather` and `gather_for_metrics` collect in one epoch.

    All ranks must have the same number of batches, and each batch must have the same size on all
    ranks. Otherwise the collectives could hang.
    """
    accelerator = Accelerator(cpu=use_cpu())
    gathered = {"gather": [], "gather_for_metrics": []}
    for batch in make_loader(settings):
        for function, ids in gathered.items():
            ids += getattr(accelerator, function)(batch.to(device)).tolist()
    return gathered

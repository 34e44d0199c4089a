"""What `accel-demo shards` does on every rank: read whole epochs, and gather as a metric does."""

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_demo.anatomy.shards import loader_of_accelerate, loader_of_torch, of_every_rank
from accel_demo.processes.connect import use_cpu

TORCH = "DistributedSampler"
ACCELERATE = "Accelerate"


@dataclass(frozen=True)
class Dealing:
    """How samples are dealt out. `batch_size` is what the DataLoader gets: with `split_batches` it
    is the batch of all processes together. The last three are Accelerate's alone.
    """

    way: str
    samples: int
    batch_size: int
    epochs: int
    set_epoch: bool = True
    shuffle: bool = True
    drop_last: bool = False
    split_batches: bool = False
    dispatch_batches: bool = False
    even_batches: bool = True

    @property
    def name(self) -> str:
        """The way, with those of its options that are not as they usually are."""
        parts = [self.way]
        parts += ["split_batches"] if self.split_batches else []
        parts += ["dispatch_batches"] if self.dispatch_batches else []
        parts += [] if self.even_batches else ["even_batches=False"]
        return ", ".join(parts)


def read_all(device: torch.device, dealings: list[Dealing]) -> dict:
    """What this rank has read under each of them, and what it has gathered. For `ranks`."""
    rounds = [(dealing, epoch) for dealing in dealings for epoch in range(dealing.epochs)]
    bar = tqdm(total=len(rounds), desc="reading", unit="epoch", disable=dist.get_rank() > 0)
    found = []
    with bar:
        for dealing in dealings:
            batches = read_epochs(dealing, bar)
            gathered = gather_an_epoch(device, dealing) if are_even(batches[0]) else {}
            found.append({"name": dealing.name, **asdict(dealing), "batches": batches, **gathered})
    where = f"{device.type} ({dist.get_backend()})"
    return {"processes": dist.get_world_size(), "device": where, "found": found}


def read_epochs(dealing: Dealing, bar: tqdm | None = None) -> list[list[list[int]]]:
    """The sample ids of each batch that comes out of this rank's loader, epoch after epoch.

    Nothing is exchanged between batches but what the loader itself exchanges: ranks may have
    unequal numbers of them.
    """
    loader, epochs = make_loader(dealing), []
    for epoch in range(dealing.epochs):
        if dealing.set_epoch:
            (loader.sampler if dealing.way == TORCH else loader).set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
        if bar is not None:
            bar.update()
    return epochs


def make_loader(dealing: Dealing) -> DataLoader:
    """This rank's loader, new, as if nothing had been read yet."""
    common = {"shuffle": dealing.shuffle, "drop_last": dealing.drop_last}
    if dealing.way == TORCH:
        return loader_of_torch(dealing.samples, dealing.batch_size, **common)
    return loader_of_accelerate(
        dealing.samples,
        dealing.batch_size,
        **common,
        split_batches=dealing.split_batches,
        dispatch_batches=dealing.dispatch_batches or None,  # None is Accelerate's own default
        even_batches=dealing.even_batches,
    )


def are_even(batches: list[list[int]]) -> bool:
    """Whether batch k is equally large on all ranks, for each k. Every rank has to ask."""
    everyone = of_every_rank([len(batch) for batch in batches])
    return all(sizes == everyone[0] for sizes in everyone)


def gather_an_epoch(device: torch.device, dealing: Dealing) -> dict[str, list[int]]:
    """The sample ids that a metric gets to see in one epoch, by Accelerate's two functions.

    Only for loaders with even batches: a collective waits for all ranks, and for equal shapes.
    """
    accelerator = Accelerator(cpu=use_cpu())
    seen = {"gather": [], "gather_for_metrics": []}
    for batch in make_loader(dealing):
        for function, ids in seen.items():
            ids += getattr(accelerator, function)(batch.to(device)).tolist()
    return seen

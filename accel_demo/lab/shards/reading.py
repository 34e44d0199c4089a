"""Read whole epochs on every rank, gather as a metric does, and say who read what."""

import string
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_demo.anatomy.shards import loader_of_accelerate, loader_of_torch
from accel_demo.processes.connect import gather_objects, use_cpu
from accel_demo.show import table

TORCH = "DistributedSampler"
ACCELERATE = "Accelerate"
MARKS = string.digits + string.ascii_lowercase  # rank 10 is a, and so on
WIDEST_MAP = 64  # samples; a wider one does not fit into a table


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
    """Return what this rank has read under each of them, and what it has gathered."""
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
    loader: Any = make_loader(dealing)
    epochs = []
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
    everyone = gather_objects([len(batch) for batch in batches])
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


def in_words(dealing: Dealing, processes: int) -> str:
    """What all ways have in common, for the line above the table."""
    per_process = dealing.batch_size // (processes if dealing.split_batches else 1)
    parts = [f"{dealing.samples} samples", f"batches of {per_process} per process"]
    parts += [] if dealing.shuffle else ["not shuffled"]
    parts += [] if dealing.set_epoch else ["set_epoch is never called"]
    parts += ["drop_last"] if dealing.drop_last else []
    return ", ".join(parts)


def reading_table(ways: list[dict]) -> str:
    """A row for each way and epoch."""
    samples, rows = ways[0]["samples"], []
    has_map = samples <= WIDEST_MAP and len(ways[0]["epochs"][0]["batches"]) <= len(MARKS)
    for way in ways:
        for epoch in way["epochs"]:
            same = {None: "–", True: "yes", False: "no"}[epoch["same_order_as_epoch_1"]]
            batches = ", ".join(str(len(batches)) for batches in epoch["batches"])
            row = [way["name"] if epoch["epoch"] == 1 else "", epoch["epoch"]]
            row += [f"`{_map(epoch, samples)}`"] if has_map else []
            row += [len(epoch["more_than_once"]), len(epoch["never"]), batches, same]
            rows.append(row)
    head = ["way", "epoch", f"who read sample 0 … {samples - 1}"][: 3 if has_map else 2]
    head += ["twice or more", "never", "batches by rank", "same order as epoch 1"]
    said = "\n\nA digit is the rank that read the sample, `*` more than one reading, `-` none."
    return table(head, rows) + (said if has_map else "")


def _map(epoch: dict, samples: int) -> str:
    """A character for each sample: its rank, * where it was read more than once, - where never."""
    marks = ["-"] * samples
    for rank, batches in enumerate(epoch["batches"]):
        for batch in batches:
            for sample in batch:
                marks[sample] = MARKS[rank] if marks[sample] == "-" else "*"
    return "".join(marks)


def metric_table(ways: list[dict]) -> str:
    """How many samples the two functions give in an epoch, and how many different ones these are.

    Where they could not be called there is a dash.
    """
    functions, rows = ("gather", "gather_for_metrics"), []
    for way in ways:
        counts = [
            f"{len(way[name])} ({len(set(way[name]))} different)" if name in way else "–"
            for name in functions
        ]
        rows.append([way["name"], way["samples"], *counts])
    return table(["way", "samples", *(f"`{name}`" for name in functions)], rows)


def what_would_hang(ranks: list[list[list[int]]]) -> str:
    """Why nothing was gathered, and what training would do; `ranks` has the batches of each."""
    lengths = [len(batches) for batches in ranks]
    most, fewest = max(lengths), min(lengths)
    if most > fewest:
        has, has_not = lengths.index(most), lengths.index(fewest)
        return (
            f"rank {has} has {most} batches, rank {has_not} has {fewest}. In training the "
            f"all-reduce of batch {fewest + 1} on rank {has} would wait for rank {has_not} until "
            "the time limit of the process group, and so would `gather`. Keep even_batches=True, "
            "or train under torch's `Join`. (Accelerate's `join_uneven_inputs` does nothing on "
            "CPUs.)"
        )
    number = next(
        k for k in range(most) if len({len(batches[k]) for batches in ranks}) > 1
    )  # the batch that is not equally large everywhere
    sizes = ", ".join(str(len(batches[number])) for batches in ranks)
    return (
        f"batch {number + 1} has {sizes} samples by rank. Training would go on, but the mean over "
        "ranks gives a sample in a smaller batch more weight. `gather` takes tensors of one "
        "shape: gloo stops with an error, NCCL waits for ever."
    )

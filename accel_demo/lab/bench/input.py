"""Measure how fast images are read: our data path against torchvision's, over the same images.

accel-demo bench input
accel-demo bench input --repeats 3 --json input.json --plot input.svg

Both sides compute in one thread and deliver the 12,000 packaged training images, shuffled, in
batches of 128. Ours is what train.py reads from; torchvision's is its FashionMNIST with ToTensor
and Normalize for every image. Workers are started and have delivered one epoch before the clock
starts, so that their start-up does not count against them.

The second table is from the first 40 steps of the default run, on all cores of the CPU: the share
of a step in which train.py waits for its next batch. OMP_NUM_THREADS, where it is set, holds for
that run.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_demo.anatomy.gil import one_torch_thread
from accel_demo.batches import loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import ASSETS, STATISTICS, load_datasets
from accel_demo.lab import machine
from accel_demo.lab.bench.baseline import torchvision_folder
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.timed_command import run_timed

REPEATS = 5
BATCH_SIZE = 128
LEAST_SECONDS = 0.3  # of one measurement: our epoch alone is too short for the clock
STEPS, FIRST_STEPS = 40, 5  # of a training run, and how many of them do not count
OURS, TORCHVISION = "ours, 0 workers", "torchvision, 0 workers"


def add_options(parser) -> None:
    """Add no option: those that every benchmark has are enough."""


def measure(options) -> Report:
    """Images per second of every way to read them, then the data wait of the default run."""
    with tempfile.TemporaryDirectory() as folder:
        with one_torch_thread():
            loaders = make_loaders()
            compared = compare(loaders[OURS].dataset, loaders[TORCHVISION].dataset)
            rates = measure_rates(loaders, options.repeats)
        del loaders  # and with them the workers
        turns = tqdm(range(options.repeats), desc="training", unit="run", leave=False)
        waits = [wait_of_a_run(f"{folder}/run-{turn}") for turn in turns]
    reading = Table("Reading images", "images/s", rates, reference=TORCHVISION, digits=0)
    waiting = Table("Waiting for data", "% of a step", {"train.py, default run": waits}, digits=2)
    ratio = statistics.median(reading.ratios(OURS))
    with_workers = Table("", "", rates, reference="torchvision, 2 workers")
    two_workers = statistics.median(with_workers.ratios(OURS))
    wait = statistics.median(waits)
    findings = [
        f"Our data path reads {ratio:,.0f} x the images/s of torchvision's without workers, "
        f"{two_workers:,.0f} x those of its two workers.",
        compared,
        f"A step of the default run waits {wait:.2g} % of its time for data.",
    ]
    facts = {"ratio": ratio, "ratio_to_two_workers": two_workers, "data_wait_percent": wait}
    return Report("input", [reading, waiting], findings, facts)


def make_loaders() -> dict[str, DataLoader]:
    """Every way to read the packaged training images, by its row in the table."""
    config = TrainConfig()
    shuffled = {"batch_size": BATCH_SIZE, "shuffle": True}
    ours = {**shuffled, "drop_last": True, **loader_options(config, torch.device("cpu"))}
    train_set, _ = load_datasets(config)
    augmented, _ = load_datasets(TrainConfig(augment=True))
    theirs = torchvision_set(*STATISTICS[config.dataset][1:])
    return {
        OURS: DataLoader(train_set, **ours),
        f"{OURS}, augmented": DataLoader(augmented, **ours),
        TORCHVISION: DataLoader(theirs, **shuffled),
        "torchvision, 1 worker": DataLoader(
            theirs, **shuffled, num_workers=1, persistent_workers=True
        ),
        "torchvision, 2 workers": DataLoader(
            theirs, **shuffled, num_workers=2, persistent_workers=True
        ),
    }


def torchvision_set(mean: Sequence[float], std: Sequence[float]):
    """The packaged training images as torchvision's own `FashionMNIST`, which loads them all."""
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    with torchvision_folder(ASSETS) as folder:
        return datasets.FashionMNIST(folder, train=True, transform=transform)


def compare(our_set, their_set) -> str:
    """Raise `AssertionError` unless both give the same first batch; say so in a sentence."""
    collate = loader_options(TrainConfig(), torch.device("cpu"))["collate_fn"]
    ours = next(iter(DataLoader(our_set, BATCH_SIZE, collate_fn=collate)))
    theirs = next(iter(DataLoader(their_set, BATCH_SIZE)))
    for our_tensor, their_tensor in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_tensor, their_tensor)  # shapes and types too
    shape, dtype = list(ours[0].shape), str(ours[0].dtype).removeprefix("torch.")
    return f"Both deliver the same: their first batches, {dtype} {shape}, agree to rounding."


def measure_rates(loaders: dict[str, DataLoader], repeats: int) -> dict[str, list[float]]:
    """Images per second of every loader, in turns."""
    for loader in loaders.values():  # start the workers while this process has no other thread
        for _ in loader:
            pass
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    with tqdm(total=repeats * len(loaders), desc="reading", unit="loader", leave=False) as bar:
        for _ in range(repeats):
            for name, loader in loaders.items():
                rates[name].append(images_per_second(loader))
                bar.update()
    return rates


def images_per_second(loader: DataLoader) -> float:
    """Over as many whole epochs as `LEAST_SECONDS` takes, each with the start of its iterator."""
    images, seconds, started_at = 0, 0.0, time.perf_counter()
    while seconds < LEAST_SECONDS:
        images += sum(len(labels) for _, labels in loader)
        seconds = time.perf_counter() - started_at
    return images / seconds


def wait_of_a_run(run_dir: str) -> float:
    """`data_wait` in a process of its own, on all cores unless OMP_NUM_THREADS says otherwise.

    It changes `DataLoader`, and Accelerate keeps one state per process.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(machine.usable_cores())
    command = ["python", "-m", "accel_demo.lab.bench.input", run_dir]
    return float(run_timed(command, OMP_NUM_THREADS=threads).lines[-1][1])


def data_wait(run_dir: str) -> float:
    """The share of train.py's steps, in percent, that the loop waits for its next batch.

    A step lasts from the end of one optimizer step to the end of the next. Here every `next` of a
    DataLoader is timed; what Accelerate does with a batch that is there is not part of the wait.
    """
    from accel_demo import train

    ends, waits = [], []
    iterate = DataLoader.__iter__

    def timed(loader):
        batches = iterate(loader)
        while True:
            started_at = time.perf_counter()
            batch = next(batches, None)
            waits.append((started_at, time.perf_counter() - started_at))
            if batch is None:
                return
            yield batch

    setattr(DataLoader, "__iter__", timed)  # noqa: B010 (torch's annotation forbids the plain form)
    register_optimizer_step_post_hook(lambda *step: ends.append(time.perf_counter()))
    with redirect_stdout(sys.stderr):
        train.main(TrainConfig(max_steps=STEPS, run_dir=run_dir))
    start, end = ends[FIRST_STEPS - 1], ends[-1]
    within = [seconds for started_at, seconds in waits if start <= started_at < end]
    if len(ends) != STEPS or len(within) != STEPS - FIRST_STEPS:
        raise RuntimeError(f"{len(ends)} steps and {len(within)} batches, not {STEPS}")
    return 100 * sum(within) / (end - start)


if __name__ == "__main__":
    print(data_wait(sys.argv[1]))

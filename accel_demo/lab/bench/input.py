"""Compare how fast train.py and torchvision load the same images.

accel-demo bench input
accel-demo bench input --repeats 3 --json input.json --plot input.svg

Both load the 12,000 packaged training images in shuffled batches of 128, with one thread per
process. train.py processes a whole batch at once, whereas torchvision's FashionMNIST applies
ToTensor and Normalize to each image. DataLoader workers load one epoch before the clock starts, so
that their start-up time is not measured.

The second table shows what percentage of its time train.py spends waiting for the next batch, in
steps 6 to 40 of a run with the default settings. This run uses OMP_NUM_THREADS threads, or one
thread per CPU core if the variable is not set.
"""

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_demo.anatomy.gil import one_torch_thread
from accel_demo.batches import loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import ASSETS, STATISTICS, load_datasets
from accel_demo.lab.bench.baseline import torchvision_folder
from accel_demo.lab.measurements import Report, Table, threads_of_a_command
from accel_demo.lab.timed_command import run_timed

REPEATS = 5
BATCH_SIZE = 128
LEAST_SECONDS = 0.3  # per measurement, because one epoch of our loader is too short to time
STEPS, WARM_UP = 40, 5  # steps per run, and how many of them are warm-up
OURS, TORCHVISION = "ours, 0 workers", "torchvision, 0 workers"
TWO_WORKERS = "torchvision, 2 workers"


def measure(options: Namespace) -> Report:
    """Measure how fast each loader is, and how much of its time a default run waits for data."""
    with one_torch_thread():
        loaders = make_loaders()
        agreement = compare(loaders[OURS].dataset, loaders[TORCHVISION].dataset)
        rates = measure_rates(loaders, options.repeats)
    del loaders  # stops the DataLoader workers
    repeats = tqdm(range(options.repeats), desc="training", unit="run", leave=False)
    waits = [wait_of_a_run() for _ in repeats]
    reading = Table("Reading images", "images/s", rates, reference=TORCHVISION, digits=0)
    waiting = Table("Waiting for data", "% of a step", {"train.py, default run": waits}, digits=2)
    ratio = reading.rows[OURS].median_ratio
    ratio_to_two_workers = Table("", "", rates, TWO_WORKERS).rows[OURS].median_ratio
    findings = [
        f"Our data path reads {ratio:,.0f} x the images/s of torchvision's without workers, "
        f"{ratio_to_two_workers:,.0f} x those of its two workers.",
        agreement,
        f"A step of the default run waits {statistics.median(waits):.2g} % of its time for data.",
    ]
    return Report([reading, waiting], findings, {"ratio_to_two_workers": ratio_to_two_workers})


def make_loaders() -> dict[str, DataLoader]:
    """Return {table row: DataLoader}. Every loader reads the packaged training images."""
    config = TrainConfig()
    shuffled = {"batch_size": BATCH_SIZE, "shuffle": True}
    ours = {**shuffled, "drop_last": True, **loader_options(config, torch.device("cpu"))}
    train_set, _ = load_datasets(config)
    augmented, _ = load_datasets(TrainConfig(augment=True))
    torchvisions = torchvision_set(*STATISTICS[config.dataset][1:])
    alive = {**shuffled, "persistent_workers": True}
    return {
        OURS: DataLoader(train_set, **ours),
        f"{OURS}, augmented": DataLoader(augmented, **ours),
        TORCHVISION: DataLoader(torchvisions, **shuffled),
        "torchvision, 1 worker": DataLoader(torchvisions, **alive, num_workers=1),
        TWO_WORKERS: DataLoader(torchvisions, **alive, num_workers=2),
    }


def torchvision_set(mean: Sequence[float], std: Sequence[float]):
    """Return the packaged training images as an in-memory torchvision `FashionMNIST`."""
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    with torchvision_folder(ASSETS) as folder:
        return datasets.FashionMNIST(folder, train=True, transform=transform)


def compare(our_set, their_set) -> str:
    """Check that both datasets return the same first batch, and return a one-line summary.

    Raises `AssertionError` if the batches differ.
    """
    collate = loader_options(TrainConfig(), torch.device("cpu"))["collate_fn"]
    ours = next(iter(DataLoader(our_set, BATCH_SIZE, collate_fn=collate)))
    theirs = next(iter(DataLoader(their_set, BATCH_SIZE)))
    for our_tensor, their_tensor in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_tensor, their_tensor)  # also compares shapes and dtypes
    shape, dtype = list(ours[0].shape), str(ours[0].dtype).removeprefix("torch.")
    return f"Both deliver the same: their first batches, {dtype} {shape}, agree to rounding."


def measure_rates(loaders: dict[str, DataLoader], repeats: int) -> dict[str, list[float]]:
    """Measure every loader once per repetition. Return {loader: [images per second]}."""
    for loader in loaders.values():  # fork the workers before this process starts threads
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
    """Read whole epochs for at least `LEAST_SECONDS`, and return the images per second.

    The time includes creating an iterator for each epoch.
    """
    images, seconds, started_at = 0, 0.0, time.perf_counter()
    while seconds < LEAST_SECONDS:
        images += sum(len(labels) for _, labels in loader)
        seconds = time.perf_counter() - started_at
    return images / seconds


def wait_of_a_run() -> float:
    """Call `data_wait` in a new process, and return its result.

    A new process is needed because `data_wait` patches `DataLoader`, and Accelerate has global
    state.
    """
    with tempfile.TemporaryDirectory() as run_dir:
        command = ["python", "-m", "accel_demo.lab.bench.input", run_dir]
        timed = run_timed(command, OMP_NUM_THREADS=threads_of_a_command())
    return json.loads(timed.printed_lines[-1])


def data_wait(run_dir: str) -> float:
    """Run train.py, and return the percentage of its time that it spends waiting for batches.

    The waiting time is the time inside `next` of the DataLoader's iterator. It does not include
    Accelerate's later work on the batch.
    """
    from accel_demo import train

    ends, waits = [], []
    iterate = DataLoader.__iter__

    def timed(loader: DataLoader) -> Iterator:
        batches = iterate(loader)
        while True:
            started_at = time.perf_counter()
            batch = next(batches, None)
            waits.append((started_at, time.perf_counter() - started_at))
            if batch is None:
                return
            yield batch

    setattr(DataLoader, "__iter__", timed)  # noqa: B010 (type checkers reject plain assignment)
    register_optimizer_step_post_hook(lambda *step: ends.append(time.perf_counter()))
    with redirect_stdout(sys.stderr):
        train.main(TrainConfig(max_steps=STEPS, run_dir=run_dir))
    start, end = ends[WARM_UP - 1], ends[-1]
    within = [seconds for started_at, seconds in waits if start <= started_at < end]
    if len(ends) != STEPS or len(within) != STEPS - WARM_UP:
        raise RuntimeError(f"measured {len(ends)} steps and {len(within)} waits in {STEPS} steps")
    return 100 * sum(within) / (end - start)


if __name__ == "__main__":
    print(data_wait(sys.argv[1]))

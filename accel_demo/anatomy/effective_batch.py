"""The batch behind a step: training on 1, 2 and 4 processes with the same global batch, or not.

python -m accel_demo.anatomy.effective_batch
python -m accel_demo.anatomy.effective_batch --processes 2 --plot effective_batch.svg
torchrun --standalone --nproc-per-node 4 -m accel_demo.anatomy.effective_batch
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel_demo.anatomy.flags import command_line, read
from accel_demo.batches import BatchShardSampler, loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import ImageSet, load_datasets
from accel_demo.errors import UserError, one_line_errors
from accel_demo.models import make_model
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save, table

BATCH, LEARNING_RATE = 32, 0.02  # of one process
IMAGES, TEST_IMAGES = 1024, 500  # every training sees each of its images once
TEST_EVERY = 128  # images
TOLERANCE = 1e-4  # two weights closer than that are the same; a large one is about 0.1
MARGIN = 0.1  # two losses closer than that are about the same


@dataclass(frozen=True)
class BatchPlan:
    """How to train. `batch_size` is per process; `factor` says how its learning rate came about."""

    processes: int
    batch_size: int
    learning_rate: float
    factor: str = ""

    @property
    def global_batch(self) -> int:
        return self.processes * self.batch_size


@dataclass(frozen=True)
class PlanResult:
    """What came of it. The losses are those of test images, after so many training images."""

    weights: torch.Tensor
    steps: int
    losses: dict[int, float]


def plan(processes: int) -> list[BatchPlan]:
    """The runs on 1, 2, 4 … processes, up to this many.

    First with the global batch of one process, then with its batch for each process: with its
    learning rate, with one times √N, and with one times N. One process with that large batch shows
    that it is the batch, and not the processes.
    Sources: Goyal et al., 2017, https://arxiv.org/abs/1706.02677 (times N); Krizhevsky, 2014,
    https://arxiv.org/abs/1404.5997 (times √N).
    """
    counts = [2**power for power in range(1, processes.bit_length()) if BATCH >= 2**power]
    return [
        BatchPlan(1, BATCH, LEARNING_RATE),
        *(BatchPlan(n, BATCH // n, LEARNING_RATE) for n in counts),
        *(BatchPlan(n, BATCH, LEARNING_RATE) for n in counts),
        *(BatchPlan(1, BATCH * n, LEARNING_RATE) for n in counts[-1:]),
        *(BatchPlan(n, BATCH, LEARNING_RATE * n**0.5, f" × √{n}") for n in counts),
        *(BatchPlan(n, BATCH, LEARNING_RATE * n, f" × {n}") for n in counts),
    ]


def train(
    run: BatchPlan,
    train_set: ImageSet,
    test_set: ImageSet,
    group: dist.ProcessGroup,
    device: torch.device,
) -> PlanResult:
    """Train for one epoch in the processes of `group`: plain SGD, so that a step is the gradient.

    The network has no batch statistics: what it computes for an image depends on no other.
    """
    config = TrainConfig(model="tiny_cnn", batch_size=run.batch_size)
    torch.manual_seed(config.seed)
    rank = dist.get_rank(group)
    sampler = BatchShardSampler(train_set, run.batch_size, run.processes, rank, config.seed)
    options = loader_options(config, device)
    loader = DataLoader(train_set, run.batch_size, sampler=sampler, drop_last=True, **options)
    device_ids = None if device.type == "cpu" else [device.index]
    model = make_model(config).to(device)
    model = DistributedDataParallel(model, device_ids=device_ids, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), run.learning_rate)
    test_images, test_labels = test_set.__getitems__(list(range(len(test_set))))
    losses = {}
    for step, (images, labels) in enumerate(loader, start=1):
        F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step * run.global_batch % TEST_EVERY == 0:
            with torch.no_grad():
                logits = model.module(test_images.to(device))
                loss = F.cross_entropy(logits, test_labels.to(device))
            losses[step * run.global_batch] = loss.item()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return PlanResult(weights, step, losses)


def train_all(runs: list[BatchPlan], device: torch.device) -> list[PlanResult]:
    """Each run in the first ranks of the launch. Rank 0 is one of them, and gets the results."""
    groups: dict[int, Any] = {}
    for processes in dict.fromkeys(run.processes for run in runs):
        groups[processes] = dist.new_group(list(range(processes)))  # every rank has to call it
    sets = load_datasets(TrainConfig(train_samples=IMAGES, test_samples=TEST_IMAGES))
    trained = []
    for run in runs:
        if dist.get_rank() < run.processes:
            trained.append(train(run, *sets, groups[run.processes], device))
        dist.barrier()
    return trained


def main(device: torch.device, options) -> None:
    if dist.get_world_size() < 2:
        raise UserError("--processes must be at least 2: one process has nothing to compare with")
    runs = plan(dist.get_world_size())
    trained = train_all(runs, device)
    if dist.get_rank() > 0:
        return
    head = ["row", "processes", "batch per process", "global batch", "steps", "learning rate"]
    head += ["same weights as row", "test loss against row 1"]
    print(table(head, rows(runs, trained)))
    if options.plot:
        save(draw(runs, trained), options.plot)


def rows(runs: list[BatchPlan], trained: list[PlanResult]) -> list[list]:
    """The cells of the table: all runs have seen the same images when their losses are compared."""
    found = []
    for index, (run, mine) in enumerate(zip(runs, trained, strict=True)):
        twins = [
            str(other + 1)
            for other, its in enumerate(trained)
            if other != index and (mine.weights - its.weights).abs().max() <= TOLERANCE
        ]
        found.append(
            [
                *(index + 1, run.processes, run.batch_size, run.global_batch, mine.steps),
                f"{LEARNING_RATE}{run.factor}",
                ", ".join(twins) or "none",
                compare(mine, trained[0]),
            ]
        )
    return found


def compare(mine: PlanResult, other: PlanResult) -> str:
    """The last loss against another's, in a word."""
    difference = mine.losses[IMAGES] - other.losses[IMAGES]
    if abs(difference) < MARGIN:
        return "about the same"
    return "higher" if difference > 0 else "lower"


def draw(runs: list[BatchPlan], trained: list[PlanResult]):
    """The test loss over the images seen: one curve for each global batch and learning rate."""
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    curves = {}  # runs with the same curve share a line
    for run, mine in zip(runs, trained, strict=True):
        curve = curves.setdefault((run.global_batch, run.factor), (mine, []))
        curve[1].append(f"{run.processes} × {run.batch_size}")
    colours = [*COLOURS[:6], COLOURS[7]]  # without yellow, which is faint on white
    for index, ((_, factor), (mine, names)) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": colours[index % 7], "marker": "osD^vPX"[index % 7]}
        if index == 0:  # it lies below those that ought to be like it
            style |= {"linewidth": 6, "alpha": 0.5}
        elif index % 2:
            style |= {"linestyle": "--", "markerfacecolor": "white", "markersize": 8}
        label = f"{', '.join(names)}: {LEARNING_RATE}{factor}"
        axes.plot(mine.losses.keys(), mine.losses.values(), label=label, **style)
    axes.set(xlabel="training images seen by all processes together", ylabel="test loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="processes × batch: learning rate", frameon=False, fontsize=8.5)
    return figure


if __name__ == "__main__":
    with one_line_errors():
        options = read(command_line(__doc__, processes=4))
        run_in_group(main, options.processes, options)

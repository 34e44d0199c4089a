"""Train on 1, 2 and 4 processes, with the same global batch and with larger batches.

python tutorials/23_effective_batch.py
torchrun --standalone --nproc-per-node 2 tutorials/23_effective_batch.py --plot batch.svg
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel_demo.batches import BatchShardSampler, loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import ImageSet, load_datasets
from accel_demo.errors import one_line_errors
from accel_demo.models import make_model
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table

BATCH, LEARNING_RATE = 32, 0.02  # the batch size is per process
IMAGES, TEST_IMAGES = 1024, 500  # each run trains on every training image once
TEST_EVERY = 128  # training images between two tests
TOLERANCE = 1e-4  # weights that differ by less are treated as equal; large weights are about 0.1
MARGIN = 0.1  # losses that differ by less are reported as "about the same"


@dataclass(frozen=True)
class BatchPlan:
    """Settings of one training run. `batch_size` is per process.

    `factor` shows how the base learning rate was multiplied, for example " × 2".
    """

    processes: int
    batch_size: int
    learning_rate: float
    factor: str = ""

    @property
    def global_batch(self) -> int:
        return self.processes * self.batch_size


@dataclass(frozen=True)
class PlanResult:
    """Result of one training run.

    `test_losses` maps the number of training images seen so far to the test loss.
    """

    weights: torch.Tensor
    steps: int
    test_losses: dict[int, float]


def make_plans(processes: int) -> list[BatchPlan]:
    """Return the plans for 1, 2, 4 … processes, up to `processes`.

    The first plans split the same global batch among the processes. The next plans use the full
    batch size on each of N processes, with the base learning rate multiplied by 1, √N or N. One
    plan uses the largest global batch in a single process, to show that the batch size matters,
    not the number of processes.
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
    plan: BatchPlan,
    train_set: ImageSet,
    test_set: ImageSet,
    group: dist.ProcessGroup,
    device: torch.device,
) -> PlanResult:
    """Train for one epoch on the processes of `group`.

    The optimizer is plain SGD, so that a step is proportional to the gradient. The model has no
    BatchNorm, so that its output for an image does not depend on the rest of the batch.
    """
    config = TrainConfig(model="tiny_cnn", batch_size=plan.batch_size)
    torch.manual_seed(config.seed)
    rank = dist.get_rank(group)
    sampler = BatchShardSampler(train_set, plan.batch_size, plan.processes, rank, config.seed)
    options = loader_options(config, device)
    loader = DataLoader(train_set, plan.batch_size, sampler=sampler, drop_last=True, **options)
    device_ids = None if device.type == "cpu" else [device.index]
    model = make_model(config).to(device)
    model = DistributedDataParallel(model, device_ids=device_ids, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), plan.learning_rate)
    test_images, test_labels = test_set.__getitems__(list(range(len(test_set))))
    test_losses = {}
    for step, (images, labels) in enumerate(loader, start=1):
        F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step * plan.global_batch % TEST_EVERY == 0:
            with torch.no_grad():
                logits = model.module(test_images.to(device))
                loss = F.cross_entropy(logits, test_labels.to(device))
            test_losses[step * plan.global_batch] = loss.item()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return PlanResult(weights, step, test_losses)


def train_all(plans: list[BatchPlan], device: torch.device) -> list[PlanResult]:
    """Run each plan on the first `plan.processes` ranks, and return this rank's results.

    Rank 0 runs every plan, so it returns all results.
    """
    counts = dict.fromkeys(plan.processes for plan in plans)
    groups = {n: dist.new_group(list(range(n))) for n in counts}  # every rank must call this
    sets = load_datasets(TrainConfig(train_samples=IMAGES, test_samples=TEST_IMAGES))
    results = []
    for plan in plans:
        if dist.get_rank() < plan.processes:
            results.append(train(plan, *sets, groups[plan.processes], device))
        dist.barrier()
    return results


def main(device: torch.device, options) -> None:
    plans = make_plans(dist.get_world_size())
    results = train_all(plans, device)
    if dist.get_rank() > 0:
        return
    head = ["row", "processes", "batch per process", "global batch", "steps", "learning rate"]
    head += ["same weights as row", "test loss against row 1"]
    print(table(head, rows(plans, results)))
    if options.plot:
        save(draw(plans, results), options.plot)


def rows(plans: list[BatchPlan], results: list[PlanResult]) -> list[list]:
    """Return the cells of the table. Losses are compared after the same number of images."""
    cells = []
    for row, (plan, result) in enumerate(zip(plans, results, strict=True), start=1):
        same_weights = [
            str(number)
            for number, other in enumerate(results, start=1)
            if number != row and (result.weights - other.weights).abs().max() <= TOLERANCE
        ]
        counts = [row, plan.processes, plan.batch_size, plan.global_batch, result.steps]
        rate, loss = f"{LEARNING_RATE}{plan.factor}", compare(result, results[0])
        cells.append([*counts, rate, ", ".join(same_weights) or "none", loss])
    return cells


def compare(result: PlanResult, reference: PlanResult) -> str:
    """Describe the last test loss: "higher" or "lower" than the reference, or "about the same"."""
    difference = result.test_losses[IMAGES] - reference.test_losses[IMAGES]
    if abs(difference) < MARGIN:
        return "about the same"
    return "higher" if difference > 0 else "lower"


def draw(plans: list[BatchPlan], results: list[PlanResult]):
    """Draw one curve of the test loss for each combination of global batch and learning rate."""
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    curves = {}
    for plan, result in zip(plans, results, strict=True):
        _, names = curves.setdefault((plan.global_batch, plan.factor), (result, []))
        names.append(f"{plan.processes} × {plan.batch_size}")
    colors = [*COLORS[:6], COLORS[7]]  # not yellow, which is hard to see on white
    for index, ((_, factor), (result, names)) in enumerate(curves.items()):
        style = {"color": colors[index % 7], "marker": "osD^vPX"[index % 7]}
        if index == 0:  # wide, so that it stays visible below curves that should match it
            style |= {"linewidth": 6, "alpha": 0.5}
        elif index % 2:
            style |= {"linestyle": "--", "markerfacecolor": "white", "markersize": 8}
        label = f"{', '.join(names)}: {LEARNING_RATE}{factor}"
        axes.plot(result.test_losses.keys(), result.test_losses.values(), label=label, **style)
    axes.set(xlabel="training images seen by all processes together", ylabel="test loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="processes × batch: learning rate", frameon=False, fontsize=8.5)
    return figure


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__, plot=True, processes=4, least=2)
        options = parser.parse_args()
        run_in_group(main, options.processes, options)

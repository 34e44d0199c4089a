"""One training in each of the ways to move a script to N processes. The verb `lr` compares them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_demo.batches import loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes.connect import use_cpu
from accel_demo.wording import counted

BATCH = 32  # of one process
TEST_IMAGES = 500
MEASURED = 8  # times in a run, after equal numbers of training images


@dataclass(frozen=True)
class ScalingRule:
    """How to go to N processes. On one process all ways are the same.

    `is_divided`: each process takes 1/N of the batch, and the global batch stays as it is.
    `is_split`: Accelerate divides it (`split_batches`), and then steps the scheduler once.
    `steps_per_process`: Accelerate's default, which steps a prepared scheduler N times.
    `sized_before`: total steps are those of the loader before `prepare` has divided it.
    `power`: the learning rate is multiplied by N to this power.
    """

    name: str
    is_divided: bool = False
    is_split: bool = False
    steps_per_process: bool = False
    sized_before: bool = False
    power: float = 0.0


RIGHT = ScalingRule("right", is_divided=True)
SPLIT = ScalingRule("right, by split_batches", is_split=True, steps_per_process=True)
STEPPED = ScalingRule("scheduler stepped ×N", is_divided=True, steps_per_process=True)
LARGER = ScalingRule("global batch ×N")
DEFAULT = ScalingRule("global batch ×N, by default", steps_per_process=True, sized_before=True)
ROOT = ScalingRule("global batch ×N, learning rate ×√N", power=0.5)
LINEAR = ScalingRule("global batch ×N, learning rate ×N", power=1.0)
WAYS = [RIGHT, SPLIT, STEPPED, LARGER, DEFAULT, ROOT, LINEAR]


@dataclass(frozen=True)
class RuleResult:
    """What came of a way. The keys of both dicts are training images seen by all processes.

    `learning_rates` has the one in force from there on: at the start, and after each step.
    `losses` are those of test images, in the main process alone. `processes` were connected.
    """

    way: ScalingRule
    processes: int
    learning_rates: dict[int, float]
    losses: dict[int, float]
    weights: torch.Tensor

    @property
    def samples(self) -> int:
        return max(self.learning_rates)

    @property
    def steps(self) -> int:
        return len(self.learning_rates) - 1

    @property
    def global_batch(self) -> int:
        return self.samples // self.steps

    @property
    def over_at(self) -> int | None:
        """Images seen when the learning rate came to the schedule's end, 0; None: it never did."""
        return next((seen for seen, rate in self.learning_rates.items() if rate == 0), None)

    @property
    def loss(self) -> float:
        return list(self.losses.values())[-1]


def train_every_way(
    device: torch.device, samples: int, learning_rate: float, ways: list[ScalingRule]
) -> list[RuleResult]:
    """In each process of a launch: all ways, one after the other, on the same images, seen once."""
    name = f"on {counted(dist.get_world_size(), 'process')}"
    bar = tqdm(ways, desc=name, unit="run", leave=False, disable=dist.get_rank() > 0)
    return [train(way, samples, learning_rate) for way in bar]


def train(way: ScalingRule, samples: int, learning_rate: float) -> RuleResult:
    """One epoch in the processes that are connected. The learning rate is the schedule's peak.

    The network has no batch statistics: what it computes for an image depends on no other.
    """
    accelerator = Accelerator(
        cpu=use_cpu(),
        step_scheduler_with_optimizer=way.steps_per_process,
        dataloader_config=DataLoaderConfiguration(
            split_batches=way.is_split, use_seedable_sampler=True, data_seed=0
        ),
    )
    device, processes = accelerator.device, accelerator.num_processes
    config = TrainConfig(
        model="tiny_cnn",
        batch_size=BATCH // processes if way.is_divided else BATCH,
        train_samples=samples,
        test_samples=TEST_IMAGES,
        optimizer="sgd",
        weight_decay=5e-4,
        learning_rate=learning_rate * processes**way.power,
    )
    torch.backends.cudnn.allow_tf32 = False  # weights could not be compared within rounding
    torch.backends.cudnn.deterministic = True  # nor the same training with itself, bit by bit
    torch.manual_seed(config.seed)
    train_set, test_set = load_datasets(config)
    options = loader_options(config, device)
    loader = DataLoader(train_set, config.batch_size, shuffle=True, drop_last=True, **options)
    steps_before = len(loader)
    model = make_model(config)
    optimizer = make_optimizer(config, model, accelerator.mixed_precision)
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    total_steps = steps_before if way.sized_before else len(loader)
    scheduler = make_scheduler(config, optimizer.optimizer, total_steps)
    scheduler = accelerator.prepare(scheduler)

    test_images, test_labels = test_set.__getitems__(list(range(len(test_set))))
    test_images, test_labels = test_images.to(device), test_labels.to(device)
    learning_rates, losses = {}, {}

    def note(seen: int) -> None:
        learning_rates[seen] = scheduler.get_last_lr()[0]
        if seen % (samples // MEASURED) == 0 and accelerator.is_main_process:
            with torch.no_grad():
                logits = accelerator.unwrap_model(model)(test_images)
                losses[seen] = F.cross_entropy(logits, test_labels).item()

    seen = 0
    note(seen)
    for images, labels in loader:
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen += len(labels) * processes  # all take as many
        note(seen)
    weights = torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])
    return RuleResult(way, processes, learning_rates, losses, weights)

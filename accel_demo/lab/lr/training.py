"""Train once with each rule for moving a script to N processes, for `accel-demo lr`."""

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

BATCH = 32  # global batch on one process
TEST_IMAGES = 500
LOSSES = 8  # recorded at equal intervals, after the initial loss


@dataclass(frozen=True)
class ScalingRule:
    """A rule for moving a script to N processes. On one process, all rules are the same.

    `is_divided`: each process takes 1/N of the batch, so the global batch does not change.
    `is_split`: Accelerate splits the batch (`split_batches`) and steps the scheduler once.
    `steps_per_process`: Accelerate's default, which steps a prepared scheduler N times.
    `sized_before`: the schedule has the length of the loader before `prepare` shards it.
    `power`: the learning rate is multiplied by N to this power.
    """

    name: str
    is_divided: bool = False
    is_split: bool = False
    steps_per_process: bool = False
    sized_before: bool = False
    power: float = 0.0


RULES = [
    ScalingRule("right", is_divided=True),
    ScalingRule("right, by split_batches", is_split=True, steps_per_process=True),
    ScalingRule("scheduler stepped ×N", is_divided=True, steps_per_process=True),
    ScalingRule("global batch ×N"),
    ScalingRule("global batch ×N, by default", steps_per_process=True, sized_before=True),
    ScalingRule("global batch ×N, learning rate ×√N", power=0.5),
    ScalingRule("global batch ×N, learning rate ×N", power=1.0),
]


@dataclass(frozen=True)
class RuleTraining:
    """Result of a training run with one rule. The keys of both dicts are numbers of images seen.

    `learning_rates` contains the rate at the start and after each step. `losses` on the test images
    are recorded only on the main process.
    """

    rule: str
    processes: int  # connected processes
    learning_rates: dict[int, float]
    losses: dict[int, float]
    weights: torch.Tensor


def train_with_rules(
    device: torch.device, samples: int, learning_rate: float, rules: list[ScalingRule]
) -> list[RuleTraining]:
    """Train with each rule in turn on the same images. Every process of a group must call this."""
    name = f"on {counted(dist.get_world_size(), 'process')}"
    bar = tqdm(rules, desc=name, unit="run", leave=False, disable=dist.get_rank() > 0)
    return [train(rule, samples, learning_rate) for rule in bar]


def train(rule: ScalingRule, samples: int, learning_rate: float) -> RuleTraining:
    """Train for one epoch. `learning_rate` is the peak of the schedule on one process.

    The network has no batch normalization, so its output for an image does not depend on the batch.
    """
    accelerator = Accelerator(
        cpu=use_cpu(),
        step_scheduler_with_optimizer=rule.steps_per_process,
        dataloader_config=DataLoaderConfiguration(
            split_batches=rule.is_split, use_seedable_sampler=True, data_seed=0
        ),
    )
    device, processes = accelerator.device, accelerator.num_processes
    config = TrainConfig(
        model="tiny_cnn",
        batch_size=BATCH // processes if rule.is_divided else BATCH,
        train_samples=samples,
        test_samples=TEST_IMAGES,
        optimizer="sgd",
        weight_decay=5e-4,
        learning_rate=learning_rate * processes**rule.power,
    )
    torch.backends.cudnn.allow_tf32 = False  # TF32 is less precise than float32
    torch.backends.cudnn.deterministic = True  # makes equal runs end with bitwise equal weights
    torch.manual_seed(config.seed)
    train_set, test_set = load_datasets(config)
    options = loader_options(config, device)
    loader = DataLoader(train_set, config.batch_size, shuffle=True, drop_last=True, **options)
    steps_before = len(loader)
    model = make_model(config)
    optimizer = make_optimizer(config, model, accelerator.mixed_precision)
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    total_steps = steps_before if rule.sized_before else len(loader)
    scheduler = make_scheduler(config, optimizer.optimizer, total_steps)
    scheduler = accelerator.prepare(scheduler)

    test_images, test_labels = test_set.__getitems__(list(range(len(test_set))))
    test_images, test_labels = test_images.to(device), test_labels.to(device)
    learning_rates, losses = {}, {}

    def record(samples_seen: int) -> None:
        learning_rates[samples_seen] = scheduler.get_last_lr()[0]
        if samples_seen % (samples // LOSSES) == 0 and accelerator.is_main_process:
            with torch.no_grad():
                logits = accelerator.unwrap_model(model)(test_images)
                losses[samples_seen] = F.cross_entropy(logits, test_labels).item()

    record(0)
    for step, (images, labels) in enumerate(loader, start=1):
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record(step * len(labels) * processes)
    weights = torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])
    return RuleTraining(rule.name, processes, learning_rates, losses, weights)

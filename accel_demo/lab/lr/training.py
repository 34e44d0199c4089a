"""Train with each rule of `accel-demo lr`."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from accel_demo.batches import loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.lab.lr.rules import BATCH, LOSSES, TEST_IMAGES, ScalingRule
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes.devices import use_cpu
from accel_demo.progress_bar import ProgressBar
from accel_demo.wording import counted


@dataclass(frozen=True)
class RuleTraining:
    """Result of a training run with one rule. The keys of both dicts are numbers of images seen.

    `learning_rates` contains the rate at the start and after each step. `losses` contains the
    losses on the test images, and is empty except on the main process.
    """

    rule: str
    seed: int
    processes: int  # connected processes
    learning_rates: dict[int, float]
    losses: dict[int, float]
    weights: torch.Tensor


def train_with_rules(
    device: torch.device, samples: int, learning_rate: float, rules: list[ScalingRule], seeds=1
) -> list[RuleTraining]:
    """Train with each rule and each seed below `seeds`, on the same images.

    Every process of the group must call this.
    """
    name = f"training on {counted(dist.get_world_size(), 'process')}"
    runs = [(rule, seed) for seed in range(seeds) for rule in rules]
    bar = ProgressBar(name, "run", runs, leave=False, is_shown=dist.get_rank() == 0)
    return [train(rule, samples, learning_rate, seed) for rule, seed in bar]


def train(rule: ScalingRule, samples: int, learning_rate: float, seed: int = 0) -> RuleTraining:
    """Train for one epoch with `rule`. `learning_rate` is the peak learning rate on one process.

    `seed` determines the initial weights and the order of the images.
    The model has no batch normalization, so that its output for an image does not depend on the
    rest of the batch.
    """
    accelerator = Accelerator(
        cpu=use_cpu(),
        step_scheduler_with_optimizer=rule.steps_per_process,
        dataloader_config=DataLoaderConfiguration(
            split_batches=rule.is_split, use_seedable_sampler=True, data_seed=seed
        ),
    )
    device, processes = accelerator.device, accelerator.num_processes
    config = TrainConfig(
        model="tiny_cnn",
        batch_size=BATCH // processes if rule.is_divided else BATCH,
        seed=seed,
        train_samples=samples,
        test_samples=TEST_IMAGES,
        optimizer="sgd",
        weight_decay=5e-4,
        learning_rate=learning_rate * processes**rule.power,
    )
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True  # so that identical runs end with identical weights
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
    return RuleTraining(rule.name, seed, processes, learning_rates, losses, weights)

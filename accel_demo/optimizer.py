"""The optimizer and its learning-rate schedule."""

import math
import sys

import torch
from torch.optim.lr_scheduler import LambdaLR

from accel_demo.config import TrainConfig
from accel_demo.slow_imports import without_garbage_collection


def make_optimizer(
    config: TrainConfig, model: torch.nn.Module, precision: str
) -> torch.optim.Optimizer:
    """Return the optimizer `config.optimizer` for all parameters of `model`.

    `precision` is "no", "bf16" or "fp16". Unless it is "fp16", the optimizer is fused: each step
    makes one pass over the parameters instead of a separate pass for each operation. With fp16, a
    fused optimizer would skip steps that overflow, but Accelerate would report them as not skipped.
    Source: https://github.com/huggingface/accelerate/issues/4242
    """
    _skip_the_search_for_lomo()
    fused = None if precision == "fp16" else True  # None, because False would also disable foreach
    options = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": fused}
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    if config.optimizer == "sgd":
        options |= {"momentum": 0.9, "nesterov": True}
    with without_garbage_collection():  # the first optimizer of a process imports torch._dynamo
        return kinds[config.optimizer](model.parameters(), **options)


def make_scheduler(
    config: TrainConfig, optimizer: torch.optim.Optimizer, total_steps: int
) -> LambdaLR:
    """Return the schedule `config.schedule` for a run of `total_steps` optimizer steps.

    The one-cycle schedule has a linear warmup and then a cosine decay to zero.
    Source: Smith and Topin, 2017, https://arxiv.org/abs/1708.07120
    """
    warmup_steps = config.warmup * total_steps

    def share_of_peak(step: int) -> float:
        if config.schedule == "constant":
            return 1.0
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, share_of_peak)


def set_schedule(scheduler: LambdaLR, step: int) -> None:
    """Set the schedule to its position after `step` optimizer steps, replacing any loaded state."""
    scheduler.last_epoch = step - 1
    scheduler.step()


def _skip_the_search_for_lomo() -> None:
    """Stop Accelerate from searching the disk for an optimizer package in each training step.

    Accelerate's `optimizer.step` checks twice whether the package `lomo_optim` is installed, and
    each check searches every folder in `sys.path`. If the package's entry in `sys.modules` is None,
    Python does not search. We do not use this package.
    Source: `is_lomo_available` in accelerate/utils/imports.py
    """
    sys.modules.setdefault("lomo_optim", None)  # pyright: ignore[reportArgumentType]

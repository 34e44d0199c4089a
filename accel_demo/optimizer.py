"""The optimizer, and the schedule of its learning rate."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from accel_demo.config import TrainConfig
from accel_demo.workarounds import skip_the_search_for_lomo, without_garbage_collection


def make_optimizer(
    config: TrainConfig, model: torch.nn.Module, precision: str
) -> torch.optim.Optimizer:
    """Return the optimizer that `config.optimizer` names, over all of the model's parameters.

    `precision` is "no", "bf16" or "fp16". The optimizer is fused: its step makes one pass over
    each parameter instead of one pass per operator. Not under fp16: a fused optimizer skips a step
    that overflowed inside its kernel, and Accelerate then reports that the step was not skipped.
    Source: https://github.com/huggingface/accelerate/issues/4242
    """
    skip_the_search_for_lomo()
    fused = None if precision == "fp16" else True  # False would also turn off torch's foreach
    options = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": fused}
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    if config.optimizer == "sgd":
        options |= {"momentum": 0.9, "nesterov": True}
    with without_garbage_collection():  # the first optimizer of a process imports torch._dynamo
        return kinds[config.optimizer](model.parameters(), **options)


def make_scheduler(
    config: TrainConfig, optimizer: torch.optim.Optimizer, total_steps: int
) -> LambdaLR:
    """Return a one-cycle schedule: a linear rise, then half a cosine down to zero.

    The cycle takes `total_steps` optimizer steps.
    Source: Smith and Topin, 2017, https://arxiv.org/abs/1708.07120
    """
    warmup_steps = config.warmup * total_steps

    def share_of_peak(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, share_of_peak)


def set_schedule(scheduler: LambdaLR, step: int) -> None:
    """Move the schedule to the position after `step` optimizer steps, whatever was loaded."""
    scheduler.last_epoch = step - 1
    scheduler.step()

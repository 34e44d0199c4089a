"""Time the parts of a training step with torch's hooks, without changing the training loop."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
BEFORE_BACKWARD = "between forward and backward: loss"
BEFORE_STEP = "between backward and optimizer step: clip gradients"
BEFORE_FORWARD = "between optimizer step and forward: zero_grad, metrics, schedule, next batch"
PARTS = [FORWARD, BEFORE_BACKWARD, BACKWARD, BEFORE_STEP, STEP, BEFORE_FORWARD]


@contextmanager
def timed_parts() -> Iterator[list[dict[str, float]]]:
    """Yield a list, and append {part: seconds} to it after each optimizer step in this process.

    "forward", "backward" and "optimizer step" are the times inside the model, `Tensor.backward` and
    `Optimizer.step`. Code that a library runs before or after these calls is included in the
    "between" parts. A part ends when the next part begins, so the parts add up to the time from the
    end of one optimizer step to the end of the next.

    The first step is not recorded, because its beginning is unknown. The time of an evaluation is
    added to the part in which it happens. Each step must have exactly one micro-batch. On a GPU,
    the times do not include the kernels, because the Python code does not wait for them.
    """
    steps: list[dict[str, float]] = []
    seconds: dict[str, float] = defaultdict(float)
    part, began_at, depth = BEFORE_FORWARD, time.perf_counter(), 0
    backward, is_first = torch.Tensor.backward, True

    def begin(next_part: str) -> None:
        nonlocal part, began_at
        now = time.perf_counter()
        seconds[part] += now - began_at
        part, began_at = next_part, now

    def enter_module(module, inputs) -> None:
        nonlocal depth
        if torch.is_grad_enabled():
            if depth == 0:
                begin(FORWARD)
            depth += 1

    def leave_module(module, inputs, outputs) -> None:
        nonlocal depth
        if torch.is_grad_enabled():
            depth -= 1
            if depth == 0:
                begin(BEFORE_BACKWARD)

    def timed_backward(loss, *arguments, **options) -> None:
        begin(BACKWARD)
        backward(loss, *arguments, **options)
        begin(BEFORE_STEP)

    def end_step(*_) -> None:
        nonlocal is_first
        begin(BEFORE_FORWARD)
        if not is_first:
            steps.append(dict(seconds))
        is_first = False
        seconds.clear()

    hooks = [
        register_module_forward_pre_hook(enter_module),
        register_module_forward_hook(leave_module),
        register_optimizer_step_pre_hook(lambda *_: begin(STEP)),
        register_optimizer_step_post_hook(end_step),
    ]
    try:
        with patch.object(torch.Tensor, "backward", timed_backward):
            yield steps
    finally:
        for hook in hooks:
            hook.remove()

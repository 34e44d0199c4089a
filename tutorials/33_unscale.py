"""Clip the gradients of two models in several ways, with one `GradScaler` for both optimizers.

python tutorials/33_unscale.py

On a CPU, Accelerate creates no scaler, so the program sets what Accelerate sets for fp16 on a GPU.
"""

import torch
from accelerate import Accelerator
from torch import nn

from accel_demo.show import table

MAX_NORM = 1e6  # so large that clipping changes nothing


def clip_twice(accelerator, a, b, optimizer_a, optimizer_b):
    accelerator.clip_grad_norm_(a.parameters(), MAX_NORM)
    accelerator.clip_grad_norm_(b.parameters(), MAX_NORM)
    optimizer_a.step()
    optimizer_b.step()


def clip_once(accelerator, a, b, optimizer_a, optimizer_b):
    accelerator.clip_grad_norm_([*a.parameters(), *b.parameters()], MAX_NORM)
    optimizer_a.step()
    optimizer_b.step()


def clip_and_step(accelerator, a, b, optimizer_a, optimizer_b):
    for model, optimizer in ((a, optimizer_a), (b, optimizer_b)):
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def unscale_clip_and_step(accelerator, a, b, optimizer_a, optimizer_b):
    for model, optimizer in ((a, optimizer_a), (b, optimizer_b)):
        accelerator.unscale_gradients(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


WAYS = {
    "`accelerator.clip_grad_norm_` for a, for b, both steps": clip_twice,
    "one `accelerator.clip_grad_norm_` for both, both steps": clip_once,
    "for each model: `accelerator.clip_grad_norm_`, `step()`": clip_and_step,
    "for each model: `accelerator.unscale_gradients(optimizer)`, "
    "`torch.nn.utils.clip_grad_norm_`, `step()`": unscale_clip_and_step,
}


def main() -> None:
    rows = [[name, *gradients_of_steps(update)] for name, update in WAYS.items()]
    print(table(["after `accelerator.backward`", "step of a", "step of b"], rows))


def gradients_of_steps(update) -> list[str]:
    """Return how the gradient that each optimizer step uses differs from the right one."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    models, optimizers, used = [nn.Linear(1, 1), nn.Linear(1, 1)], [], []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model.weight
        optimizer.register_step_pre_hook(lambda *_, w=weight: used.append(w.grad.item()))
        optimizers.append(accelerator.prepare(optimizer))
    outputs = [model(torch.ones(1, 1)).sum() for model in models]  # the right gradients are 1
    accelerator.backward(sum(outputs))
    try:
        update(accelerator, *models, *optimizers)
    except RuntimeError as error:
        return [f"`RuntimeError: {error}`", ""]
    return ["right" if gradient == 1 else f"÷ {1 / gradient:,.0f}" for gradient in used]


if __name__ == "__main__":
    main()

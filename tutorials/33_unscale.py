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


def one_optimizer(accelerator, a, b, optimizer):
    accelerator.clip_grad_norm_([*a.parameters(), *b.parameters()], MAX_NORM)
    optimizer.step()


WAYS = {
    "`accelerator.clip_grad_norm_` for a, for b, both steps": clip_twice,
    "one `accelerator.clip_grad_norm_` for both, both steps": clip_once,
    "for each model: `accelerator.clip_grad_norm_`, `step()`": clip_and_step,
    "for each model: `accelerator.unscale_gradients(optimizer)`, "
    "`torch.nn.utils.clip_grad_norm_`, `step()`": unscale_clip_and_step,
    "one optimizer for both: `accelerator.clip_grad_norm_`, `step()`": one_optimizer,
}


def main() -> None:
    rows = []
    for name, update in WAYS.items():
        a, b = gradients_of_steps(update, growth_interval=2000)
        _, b_changed = gradients_of_steps(update, growth_interval=1)
        rows.append([name, a, b, b_changed])
    head = ["after `accelerator.backward`", "gradient of a", "of b", "of b, if the factor doubles"]
    print(table(head, rows))


def gradients_of_steps(update, growth_interval: int) -> list[str]:
    """Return how the gradients that the optimizer steps use differ from the right ones.

    The factor doubles after `growth_interval` updates.
    """
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    models, optimizers, used = [nn.Linear(1, 1), nn.Linear(1, 1)], [], []
    for group in [models] if update is one_optimizer else [[model] for model in models]:
        optimizer = torch.optim.SGD(nn.ModuleList(group).parameters(), lr=0.1)
        weights = [model.weight for model in group]
        optimizer.register_step_pre_hook(
            lambda *_, weights=weights: used.extend(weight.grad.item() for weight in weights)
        )
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

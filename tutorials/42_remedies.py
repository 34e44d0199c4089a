"""Measure what each remedy for too little memory saves and costs, on a small transformer.

python tutorials/42_remedies.py

The memory is that of all tensors that exist, at the peak of a training step, counted after each
operation. It is the same on each machine. The second peak, with a batch of 1, is nearly all
weights, gradients and optimizer state, so the difference of the two is nearly all activations.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from encoder import Encoder
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accel_demo.anatomy.live import LiveBytes
from accel_demo.show import table

LAYERS, WIDTH, TOKENS, BATCH = 3, 128, 64, 16
STEPS = 2  # the optimizer creates its state in the first


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def step(model, optimizer, batch, micro_batches: int = 1, context: Callable = nullcontext):
    for part in batch.chunk(micro_batches):
        with context():
            loss = F.mse_loss(model(part), part) / micro_batches
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class InBackward:
    """Update each weight as soon as its gradient is complete, and free the gradient."""

    def __init__(self, parameters):
        for parameter in parameters:
            optimizer = torch.optim.AdamW([parameter])
            parameter.register_post_accumulate_grad_hook(self.update(optimizer))

    @staticmethod
    def update(optimizer):
        def hook(_):
            optimizer.step()
            optimizer.zero_grad()

        return hook

    def step(self):
        pass

    zero_grad = step


def sgd(parameters):
    return torch.optim.SGD(parameters, 1e-3)


# remedy: (optimizer, checkpointing, dtype of the weights, keyword arguments of `step`)
REMEDIES = {
    "none": (torch.optim.AdamW, False, torch.float32, {}),
    "4 micro-batches": (torch.optim.AdamW, False, torch.float32, {"micro_batches": 4}),
    "activation checkpointing": (torch.optim.AdamW, True, torch.float32, {}),
    "both": (torch.optim.AdamW, True, torch.float32, {"micro_batches": 4}),
    "bf16 autocast": (torch.optim.AdamW, False, torch.float32, {"context": autocast}),
    "bf16 weights and all": (torch.optim.AdamW, False, torch.bfloat16, {}),
    "update in backward": (InBackward, False, torch.float32, {}),
    "Adafactor": (torch.optim.Adafactor, False, torch.float32, {}),
    "SGD": (sgd, False, torch.float32, {}),
}


def make_model(remedy: str) -> nn.Module:
    _, checkpointing, dtype, _ = REMEDIES[remedy]
    torch.manual_seed(0)
    return Encoder(LAYERS, WIDTH, checkpointing).to(dtype)


def train(remedy: str, batch_size: int, mode=None) -> tuple[nn.Module, int]:
    """Train for some steps. Return the model and, without `mode`, the peak in bytes."""
    make_optimizer, _, dtype, settings = REMEDIES[remedy]
    model = make_model(remedy)
    optimizer = make_optimizer(model.parameters())
    batch = torch.randn(batch_size, TOKENS, WIDTH).to(dtype)
    with mode or LiveBytes([*model.parameters(), batch]) as live:
        for _ in range(STEPS):
            step(model, optimizer, batch, **settings)
    return model, 0 if mode else live.peak


def main():
    rows, weights, flops = [], {}, {}
    for remedy in REMEDIES:
        model, peak = train(remedy, BATCH)
        _, peak_of_one = train(remedy, 1)
        counter = FlopCounterMode(display=False)
        train(remedy, BATCH, counter)
        flops[remedy] = counter.get_total_flops()
        weights[remedy] = nn.utils.parameters_to_vector(model.parameters()).detach().float()
        difference = (weights[remedy] - weights["none"]).abs().max().item()
        mib = [f"{size / 2**20:.1f}" for size in (peak, peak_of_one)]
        rows.append([remedy, *mib, f"{flops[remedy] / flops['none']:.2f}", verdict(difference)])
    head = ["remedy", f"MiB, batch {BATCH}", "MiB, batch 1", "operations", "weights after 2 steps"]
    print(table(head, rows))


def verdict(difference: float) -> str:
    if difference == 0:
        return "the same bits"
    return "the same, but for rounding" if difference < 1e-4 else "different"


if __name__ == "__main__":
    main()

"""Accumulate the gradients of two models. Count each model's all-reduces and optimizer steps.

python tutorials/23_two_models.py
"""

from collections import Counter

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import table

WINDOW, EVENTS = 4, ("all-reduces", "steps")


def count_all_reduce(counts: Counter, bucket):
    """Average a bucket's gradients. DDP calls this instead of its own all-reduce."""
    counts["all-reduces"] += 1
    return allreduce_hook(None, bucket)


class Part:
    """A prepared model and its optimizer, with counts of all-reduces and optimizer steps."""

    def __init__(self, accelerator: Accelerator):
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.counts = Counter()
        optimizer.register_step_post_hook(self.count_step)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.model.register_comm_hook(self.counts, count_all_reduce)

    def count_step(self, *_):
        self.counts["steps"] += 1

    def train(self, accelerator: Accelerator, inputs: torch.Tensor) -> None:
        accelerator.backward(self.model(inputs).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()


def only_a(accelerator, a, b, inputs):
    with accelerator.accumulate(a.model):
        a.train(accelerator, inputs)
        b.train(accelerator, inputs)


def one_after_the_other(accelerator, a, b, inputs):
    with accelerator.accumulate(a.model):
        a.train(accelerator, inputs)
    with accelerator.accumulate(b.model):
        b.train(accelerator, inputs)


def both(accelerator, a, b, inputs):
    with accelerator.accumulate(a.model, b.model):
        a.train(accelerator, inputs)
        b.train(accelerator, inputs)


WAYS = {
    "`accumulate(a)` around both": only_a,
    "`accumulate(a)`, then `accumulate(b)`": one_after_the_other,
    "`accumulate(a, b)` around both": both,
}


def main(device: torch.device) -> None:
    rows = []
    for name, train in WAYS.items():
        accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
        a, b = Part(accelerator), Part(accelerator)
        for _ in range(WINDOW):
            train(accelerator, a, b, torch.randn(8, 8, device=device))
        rows.append([name, *(part.counts[each] for part in (a, b) for each in EVENTS)])
    if accelerator.is_main_process:
        head = ["one window of 4", "all-reduces of a", "steps of a"]
        print(table([*head, "all-reduces of b", "steps of b"], rows))


if __name__ == "__main__":
    run_in_group(main, 2)

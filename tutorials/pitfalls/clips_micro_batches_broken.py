"""Clip the gradients in each micro-batch, before they are complete and averaged.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/clips_micro_batches_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.arange(8.0)[:, None]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    [right] = torch.autograd.grad(model(data).square().mean(), model.weight)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    norms = []
    for _ in range(3):
        for batch in loader:  # a step combines 2 batches of 2 processes: all samples
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print(f"{accelerator.num_processes} processes: the first step clips", end=" ")
    accelerator.print([round(norm.item(), 2) for norm in norms[: len(norms) // 3]])
    accelerator.print(f"the gradient of all samples is {right.item():.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

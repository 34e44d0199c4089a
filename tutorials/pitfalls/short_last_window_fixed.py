"""Divide each loss by the number of micro-batches that its step really has.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/short_last_window_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import l1_loss
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.arange(24.0)[:, None]
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    right = -data[16:].mean()  # the gradient of l1_loss for the samples of the last step
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for _ in range(3):
        gradients = []
        for index, batch in enumerate(loader):  # 3 batches per process: steps of 2 and 1
            with accelerator.accumulate(model):
                loss = l1_loss(model(batch), batch)
                length = min(2, len(loader) - index // 2 * 2)
                loss = loss * 2 / length  # accelerator.backward divides it by 2
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    gradients.append(model.module.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
    world_size = accelerator.num_processes
    accelerator.print(f"{world_size} processes: the last gradient is {gradients[-1]}")
    accelerator.print(f"the gradient of its samples is {right.item()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

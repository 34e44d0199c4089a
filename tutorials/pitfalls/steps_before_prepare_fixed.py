"""Create a scheduler for the number of batches after `prepare`, which are those of one process.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/steps_before_prepare_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.linspace(0, 1, 16)[:, None], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=2 * len(loader))
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    [rate] = scheduler.get_last_lr()
    accelerator.print(f"{accelerator.num_processes} processes: the learning rate is", end=" ")
    accelerator.print(f"{rate:.3f} after {2 * len(loader)} steps of {scheduler.total_iters}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

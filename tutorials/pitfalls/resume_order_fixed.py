"""Resume with a new loader, and give it the number of the epoch.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/resume_order_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader


def run(accelerator, epochs):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in epochs:
        loader.set_epoch(epoch)
        order = []
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            order += batch.int().flatten().tolist()
        processes = accelerator.num_processes
        accelerator.print(f"epoch {epoch}: rank 0 of {processes} reads {order}")


def main():
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    run(accelerator, range(2))
    run(accelerator, range(2, 4))  # resumed
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Divide the samples with a `DistributedSampler`, and then again with `prepare`.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/loader_divided_twice_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.arange(16.0)[:, None]
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    samples = []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        samples += batch.int().flatten().tolist()
    samples = set(gather_object(samples))
    accelerator.print(f"{accelerator.num_processes} processes read {len(samples)} of 16 samples")
    accelerator.end_training()


if __name__ == "__main__":
    main()

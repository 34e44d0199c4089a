"""Train with a loader that was not prepared: each rank reads all samples.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/loader_not_prepared_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_size=2, shuffle=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    samples = []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        samples += batch.int().flatten().tolist()
    samples = gather_object(samples)
    read = f"read {len(samples)} samples, {len(set(samples))} different ones"
    accelerator.print(f"{accelerator.num_processes} processes {read}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

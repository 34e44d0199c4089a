"""Load weights to `accelerator.device`, which is `cpu:0` in several processes on CPUs.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/map_location_broken.py
"""

import tempfile

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.rand(16, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    device = accelerator.device
    accelerator.print(f"{accelerator.num_processes} processes load to {device}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/model.pt")
        weights = torch.load(f"{folder}/model.pt", map_location=device)
    accelerator.unwrap_model(model).load_state_dict(weights)
    accelerator.print(f"{len(weights)} tensors loaded")
    accelerator.end_training()


if __name__ == "__main__":
    main()

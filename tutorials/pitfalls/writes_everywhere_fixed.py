"""Append the loss of each step to a file on the main process only.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/writes_everywhere_fixed.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.rand(16, 1), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with tempfile.TemporaryDirectory() as folder:
        [folder] = broadcast_object_list([folder])  # that of the main process
        path = Path(folder, "losses.csv")
        if accelerator.is_main_process:
            path.write_text("step,loss\n")  # begin a new file
        accelerator.wait_for_everyone()
        for step, batch in enumerate(loader):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss = accelerator.reduce(loss.detach(), "mean")
            if accelerator.is_main_process:
                with path.open("a") as file:
                    file.write(f"{step},{loss:.4f}\n")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            lines = len(path.read_text().splitlines()) - 1
            print(f"{accelerator.num_processes} processes: {lines} lines for {len(loader)} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()

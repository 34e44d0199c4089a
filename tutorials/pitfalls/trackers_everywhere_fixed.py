"""Create one TensorBoard run, on the main process.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/trackers_everywhere_fixed.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(torch.rand(16, 1), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.init_trackers("training")
        for step, batch in enumerate(loader):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss = accelerator.reduce(loss.detach(), "mean")
            accelerator.log({"loss": loss}, step)
        runs = torch.tensor(len(list(Path(folder).rglob("events.out*"))))
        runs = accelerator.reduce(runs)  # over all processes
        accelerator.print(f"TensorBoard runs of {accelerator.num_processes} processes: {runs}")
        accelerator.end_training()


if __name__ == "__main__":
    main()

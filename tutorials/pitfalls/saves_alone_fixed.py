"""Wait for everyone on all processes, and save in a branch that only the main process runs.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/saves_alone_fixed.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader


def main():
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=5))  # so that it doesn't take long
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(1, 4):
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"{accelerator.num_processes} processes end epoch {epoch}", flush=True)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/model.pt")
            print(f"saved the model of epoch {epoch}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()

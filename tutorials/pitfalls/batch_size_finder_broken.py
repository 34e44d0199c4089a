"""Find the largest batch size that fits into memory, in each process alone.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/batch_size_finder_broken.py
"""

from datetime import timedelta

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import find_executable_batch_size
from torch import nn
from torch.utils.data import DataLoader


def main():
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=5))  # so that it doesn't take long
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    rank = accelerator.process_index

    @find_executable_batch_size(starting_batch_size=8)
    def largest_batch_size(batch_size):
        if rank == 1 and batch_size > 4:  # as if another program used the memory of its GPU
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    batch_size = largest_batch_size()
    if rank == 1:
        print(f"rank 1 of {accelerator.num_processes} reads batches of {batch_size}", flush=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(32.0)[:, None], batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"rank 0 has made {len(loader)} steps", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Resume in the middle of an epoch, and skip the batches that have been read.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/resume_repeats_data_fixed.py
"""

import tempfile

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    samples = []

    def train(batches, last_step=None):
        for step, batch in enumerate(batches, 1):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            samples.extend(batch.int().flatten().tolist())
            if step == last_step:
                break

    train(loader, last_step=2)  # of 4
    with tempfile.TemporaryDirectory() as folder:
        [folder] = broadcast_object_list([folder])  # that of the main process
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)  # in the next run
        train(accelerator.skip_first_batches(loader, 2))
    read = gather_object(samples)
    twice = len(read) - len(set(read))
    accelerator.print(f"{accelerator.num_processes} processes: {twice} of 16 samples read twice")
    accelerator.end_training()


if __name__ == "__main__":
    main()

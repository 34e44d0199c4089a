"""Read all batches from a batch sampler that has no attribute `batch_size`.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/batch_sampler_loses_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, Sampler


class BatchesOfEqualLength(Sampler):
    def __init__(self, lengths, batch_size):
        self.batches = []
        for length in sorted(set(lengths)):
            same = [index for index, each in enumerate(lengths) if each == length]
            self.batches += [same[n : n + batch_size] for n in range(0, len(same), batch_size)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    sampler = BatchesOfEqualLength([5] * 6 + [7] * 2 + [8] * 2 + [9] * 6, batch_size=3)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_sampler=sampler)
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

"""Let an `IterableDataset` yield all samples, and let Accelerate divide them.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/stream_divided_twice_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(16.0)[:, None]


def main():
    # Each rank reads the stream itself, instead of getting its batches from rank 0.
    configuration = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(Stream(), batch_size=2)
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

"""Shuffle a stream with a buffer, and see in which epochs the order changes.

python tutorials/36_shuffle.py
"""

import multiprocessing
import random

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_demo.show import table

SAMPLES, BUFFER = 12, 4


class Shuffled(IterableDataset):
    def __init__(self, seed, is_shared=False):
        self.seed, self.epoch = seed, [0]  # each worker has a copy of the list
        if is_shared:
            self.epoch = torch.zeros(1, dtype=torch.long).share_memory_()

    def set_epoch(self, epoch):
        self.epoch[0] = epoch

    def __iter__(self):
        generator, buffer = random.Random(f"{self.seed} {int(self.epoch[0])}"), []
        for sample in range(SAMPLES):
            buffer.append(sample)
            if len(buffer) == BUFFER:
                yield buffer.pop(generator.randrange(BUFFER))
        generator.shuffle(buffer)
        yield from buffer


def main():
    multiprocessing.set_forkserver_preload(["torch"])  # the worker starts in milliseconds
    rows = [
        row("`set_epoch` not called", calls=False),
        row("`set_epoch`, new workers in each epoch"),
        row("`set_epoch`, `persistent_workers`", persists=True),
        row("the same, epoch in shared memory", persists=True, is_shared=True),
    ]
    print(table(["loader with one worker", "order in epoch 0", "order in epoch 1"], rows))


def row(name, calls=True, persists=False, is_shared=False):
    stream = Shuffled(0, is_shared)
    workers = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    loader = DataLoader(stream, batch_size=None, persistent_workers=persists, **workers)
    orders = []
    for epoch in (0, 1):
        if calls:
            stream.set_epoch(epoch)
        orders.append(" ".join(map(str, loader)))
    return [name, *orders]


if __name__ == "__main__":
    main()

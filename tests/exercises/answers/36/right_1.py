"""Exercise 36: read each sample of a stream once, with ranks and loader workers.

`Stream` reads numbers from several files, one per line. Each loader worker of each rank has its own
copy of it, and the loader isn't prepared by Accelerate. Complete `__iter__`, so that in an epoch

- no sample is read twice, by any worker of any rank;
- all ranks have the same number of batches, all of `batch_size` samples. At the end, fewer samples
  may be left out than one batch of every reader has, where a reader is a loader worker of a rank,
  or a rank without workers;
- the order depends on the seed and the epoch, and on nothing else.

The files have different lengths, nobody has counted their lines, and there may be fewer files than
readers. You may shuffle as you like, for example only the list of the files. The check reads with
1, 2 and 3 ranks, each with 0 and 2 workers.

accel-demo check 36
"""

import itertools

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, paths, batch_size, rank, world_size, seed=0):
        self.paths, self.batch_size = paths, batch_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        """Is called before each epoch, before the loader starts its workers."""
        self.epoch = epoch

    def __iter__(self):
        """Yield the samples of this reader, as integers."""
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        samples = [sample for path in self.paths for sample in read(path)]
        order = torch.randperm(len(samples), generator=generator).tolist()
        info = get_worker_info()
        reader, readers = self.rank, self.world_size
        if info is not None:
            reader = self.rank * info.num_workers + info.id
            readers = self.world_size * info.num_workers
        batches = len(samples) // (readers * self.batch_size)
        own = itertools.islice(order, reader, None, readers)
        for index in itertools.islice(own, batches * self.batch_size):
            yield samples[index]


def read(path):
    """Yield the numbers in a file."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield int(line)

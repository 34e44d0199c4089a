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

import random

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
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = worker * self.world_size + self.rank, workers * self.world_size
        paths = list(self.paths)
        random.Random(f"{self.seed} {self.epoch}").shuffle(paths)  # the same in all readers
        start, group = reader * self.batch_size, []  # a batch for each reader
        for path in paths:
            for sample in read(path):
                group.append(sample)
                if len(group) == readers * self.batch_size:
                    yield from group[start : start + self.batch_size]
                    group.clear()


def read(path):
    """Yield the numbers in a file."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield int(line)

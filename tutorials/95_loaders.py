"""Show what two processes read from different loaders, and what `gather_for_metrics` returns of it.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml tutorials/95_loaders.py
"""

from collections import Counter

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object, set_seed
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_demo import show
from accel_demo.wording import listed

NUMBERS = torch.arange(10)  # each sample is its own index
HEAD = ["loader", "rank 0 gets", "rank 1 gets", "compared with one process"]


class Permutation(Sampler):
    def __len__(self):
        return 10

    def __iter__(self):
        yield from torch.randperm(10).tolist()


class Batches(Sampler):
    def __init__(self, *batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        yield from self.batches


class BatchesOf3(Batches):
    batch_size = 3


class Stream(IterableDataset):
    def __iter__(self):
        yield from NUMBERS


def loaders():
    generator = torch.Generator().manual_seed(0)
    batches = [0, 1, 2], [3, 4], [5, 6, 7], [8, 9]
    weighted = WeightedRandomSampler(torch.ones(10), 10, generator=generator)
    half = SubsetRandomSampler([0, 1, 2, 3, 4], generator)
    return {
        "`DataLoader(data, 2)`": DataLoader(NUMBERS, 2),
        "`WeightedRandomSampler`": DataLoader(NUMBERS, 2, sampler=weighted),
        "`SubsetRandomSampler`": DataLoader(NUMBERS, 2, sampler=half),
        "`drop_last=True`": DataLoader(NUMBERS, 3, drop_last=True),
        "`Subset`": DataLoader(Subset(NUMBERS, range(5)), 2),
        "own sampler, no generator": DataLoader(NUMBERS, 2, sampler=Permutation()),
        "own batch sampler": DataLoader(NUMBERS, batch_sampler=Batches(*batches)),
        "the same, three batches": DataLoader(NUMBERS, batch_sampler=Batches(*batches[:3])),
        "own, with `batch_size = 3`": DataLoader(NUMBERS, batch_sampler=BatchesOf3(*batches)),
        "`IterableDataset`": DataLoader(Stream(), 2),
    }


def read(loader, accelerator=None):
    """Return the batches, and the samples that `gather_for_metrics` returns, as lists."""
    batches, gathered = [], []
    for batch in loader:
        batches.append(batch.tolist())
        # A list, because two batches may have different sizes.
        gathered += accelerator.gather_for_metrics(batch.tolist()) if accelerator else batches[-1]
    return batches, gathered


def difference(gathered, expected):
    more, fewer = (
        [str(number) for number in sorted(set(one - other))]
        for one, other in (
            (Counter(gathered), Counter(expected)),
            (Counter(expected), Counter(gathered)),
        )
    )
    parts = [f"{listed(more)} twice"] if more else []
    parts += [f"{listed(fewer)} missing"] if fewer else []
    return "; ".join(parts) or "the same samples"


def main():
    rows = []
    for dispatches in (None, False):
        configuration = DataLoaderConfiguration(dispatch_batches=dispatches)
        cpu = not torch.cuda.is_available()
        accelerator = Accelerator(cpu=cpu, dataloader_config=configuration)
        assert accelerator.num_processes == 2
        for name in loaders():
            if dispatches is False and name != "`IterableDataset`":
                continue
            set_seed(0)
            _, expected = read(loaders()[name])
            set_seed(0, device_specific=True)
            own, gathered = read(accelerator.prepare(loaders()[name]), accelerator)
            parts = [" ".join(map(str, part)) for part in gather_object([own])]
            name += ", `dispatch_batches=False`" if dispatches is False else ""
            rows.append([name, *parts, difference(gathered, expected)])
    accelerator.print(show.table(HEAD, rows))
    accelerator.end_training()


if __name__ == "__main__":
    main()

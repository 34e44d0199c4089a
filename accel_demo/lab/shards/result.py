"""The result of `accel-demo shards`: the samples that each rank read in each epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

Batches = list[list[int]]  # one rank's batches in an epoch, as lists of sample ids
TORCH = "DistributedSampler"
ACCELERATE = "Accelerate"


@dataclass(frozen=True)
class LoaderSettings:
    """Settings of a loader that returns sample ids. The last three fields are only for Accelerate.

    `batch_size` is the batch size per process, or the global batch size if `split_batches` is true.
    """

    method: str
    samples: int
    batch_size: int
    epochs: int
    set_epoch: bool = True
    shuffle: bool = True
    drop_last: bool = False
    split_batches: bool = False
    dispatch_batches: bool = False
    even_batches: bool = True

    @property
    def name(self) -> str:
        """The method, followed by the Accelerate settings that differ from their defaults."""
        parts = [self.method]
        parts += ["split_batches"] if self.split_batches else []
        parts += ["dispatch_batches"] if self.dispatch_batches else []
        parts += [] if self.even_batches else ["even_batches=False"]
        return ", ".join(parts)


@dataclass(frozen=True)
class EpochReads:
    """The samples that the ranks read in one epoch."""

    epoch: int  # counted from 1
    more_than_once: list[int]
    never: list[int] | None  # None if the samples of the dataset are unknown
    same_order_as_epoch_1: bool | None  # None for epoch 1, and if the epoch is not complete
    batches: list[Batches]  # one list per rank
    is_complete: bool = True  # every rank has read its last batch


@dataclass(frozen=True)
class LoaderReads:
    """The samples that the ranks read with one loader.

    `samples` is the size of its dataset. `gather` and `gather_for_metrics` contain the sample ids
    that Accelerate's functions of the same names return in one epoch. Both are None if the ranks'
    batches differ in number or size, because gathering them could hang.
    """

    name: str
    samples: int
    settings: LoaderSettings
    epochs: list[EpochReads]
    gather: list[int] | None = None
    gather_for_metrics: list[int] | None = None


@dataclass(frozen=True)
class ShardsResult:
    """The samples that the connected processes read with each loader."""

    processes: int
    device: str
    loaders: list[LoaderReads]


def epoch_reads(
    number: int,
    ranks: Sequence[Batches],
    first_epoch: Sequence[Batches],
    samples: int,
    is_complete: bool = True,
) -> EpochReads:
    """Find samples that were read more than once or never, and compare the order with epoch 1."""
    readers = readers_of(ranks, samples)
    return EpochReads(
        epoch=number,
        more_than_once=[sample for sample, ranks_of in enumerate(readers) if len(ranks_of) > 1],
        never=[sample for sample, ranks_of in enumerate(readers) if not ranks_of],
        same_order_as_epoch_1=ranks == first_epoch if number > 1 and is_complete else None,
        batches=list(ranks),
        is_complete=is_complete,
    )


def readers_of(ranks: Sequence[Batches], samples: int) -> list[list[int]]:
    """List the ranks that read each of the first `samples` samples.

    A rank that read a sample twice is listed twice.
    """
    readers = [[] for _ in range(samples)]
    for rank, batches in enumerate(ranks):
        for batch in batches:
            for sample in batch:
                if sample < samples:
                    readers[sample].append(rank)
    return readers


def explain_uneven_batches(ranks: list[Batches]) -> str:
    """Explain why the ranks' batches cannot be gathered, and what would happen in training."""
    lengths = [len(batches) for batches in ranks]
    most, fewest = max(lengths), min(lengths)
    if most > fewest:
        longest, shortest = lengths.index(most), lengths.index(fewest)
        return (
            f"rank {longest} has more batches ({most}) than rank {shortest} ({fewest}). In "
            f"training the all-reduce of batch {fewest + 1} on rank {longest} would wait for rank "
            f"{shortest} until the time limit of the process group, and so would `gather`. Keep "
            "even_batches=True, or train with drop_last=True."
        )
    sizes = zip(*([len(batch) for batch in batches] for batches in ranks), strict=True)
    number, uneven = next(item for item in enumerate(sizes, start=1) if len(set(item[1])) > 1)
    return (
        f"batch {number} has {', '.join(map(str, uneven))} samples by rank. Training would "
        "continue, but a sample in a smaller batch would have more weight in the mean over ranks. "
        "`gather` requires equal shapes. Otherwise the result is undefined: gloo usually raises an "
        "error, and NCCL may also hang or return wrong numbers."
    )

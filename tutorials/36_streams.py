"""Count how often two processes with two loader workers each read the samples of a stream.

python tutorials/36_streams.py
"""

import multiprocessing

import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import PRELOADED, run_in_group
from accel_demo.show import table

FILES = [range(0, 2), range(2, 7), range(7, 10), range(10, 17)]  # each sample is a number
SAMPLES, WORKERS = 17, 2
HEAD = ["loader", "the stream is divided", "reads of each sample", "verdict", "batches by rank"]


class Stream(IterableDataset):
    """Yield one reader's part. Readers are ranks, workers of a rank, or workers of all ranks."""

    def __init__(self, by_ranks=False, by_workers=False, whole_files=False):
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if by_ranks else (0, 1)
        self.by_workers, self.whole_files = by_workers, whole_files

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info and self.by_workers else (0, 1)
        reader, readers = worker * self.ranks + self.rank, workers * self.ranks
        number = 0
        for file in FILES[reader::readers] if self.whole_files else FILES:
            for sample in file:
                if self.whole_files or number % readers == reader:
                    yield sample
                number += 1


def main(device):
    multiprocessing.set_forkserver_preload(["accelerate"])  # workers start in milliseconds
    both = {"by_ranks": True, "by_workers": True}
    rows = [
        row("not prepared", "nothing"),
        row("not prepared", "by worker", by_workers=True),
        row("not prepared", "by rank", by_ranks=True),
        row("not prepared", "by both", **both),
        row("not prepared", "by both, files", **both, whole_files=True),
    ]
    for dispatches in (None, False):
        name = "prepared" if dispatches is None else "`dispatch_batches=False`"
        configuration = DataLoaderConfiguration(dispatch_batches=dispatches)
        prepare = Accelerator(cpu=use_cpu(), dataloader_config=configuration).prepare
        rows += [
            row(name, "nothing", prepare),
            row(name, "by worker", prepare, by_workers=True),
            row(name, "by worker, files", prepare, by_workers=True, whole_files=True),
            row(name, "by both", prepare, **both),
        ]
        if dispatches is None:
            rows.append(
                row("prepared, `drop_last=True`", "by worker", prepare, True, by_workers=True)
            )
    if dist.get_rank() == 0:
        print(table(HEAD, rows))


def row(loader_name, stream_name, prepare=lambda loader: loader, drop_last=False, **settings):
    workers = {"num_workers": WORKERS, "multiprocessing_context": "forkserver"}
    loader = DataLoader(Stream(**settings), 2, drop_last=drop_last, **workers)
    batches = [batch.tolist() for batch in prepare(loader)]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batches)
    read = [sample for part in parts for batch in part for sample in batch]
    times = [read.count(sample) for sample in range(SAMPLES)]
    digits, numbers = "".join(map(str, times)), ", ".join(str(len(part)) for part in parts)
    return [loader_name, stream_name, f"`{digits}`", verdict(times), numbers]


def verdict(times):
    """Sum up how many times each sample is read."""
    least, most = min(times), max(times)
    if least == 0:
        return f"{times.count(0)} lost"
    usual = {1: "once", 2: "twice"}.get(least, f"{least} times")
    return usual if least == most else f"{usual}, {SAMPLES - times.count(least)} repeated"


if __name__ == "__main__":
    run_in_group(main, 2, preloaded=(*PRELOADED, "accelerate"))

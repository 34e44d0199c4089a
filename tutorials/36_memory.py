"""Measure what a dataset takes in two processes, and in two loader workers of each. Linux only.

The last column is what a worker gets that is not forked.

python tutorials/36_memory.py
"""

import pickle
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accel_demo.processes.group import results_by_rank
from accel_demo.show import table

LINES, WIDTH, PROCESSES, MB = 1_000_000, 40, 2, 1e6
NAMES = [
    "nothing",
    "list of `bytes`",
    "NumPy array",
    "file, with `np.memmap`",
    "path, `np.memmap` in the worker",
]
state = {}  # the loader of this process


class Lines:
    def __init__(self, name, path):
        self.name, self.path, self.lines = name, path, None
        if name.startswith("list"):
            self.lines = [b"%040d" % number for number in range(LINES)]
        elif name.startswith("NumPy"):
            self.lines = np.fromfile(path, np.uint8).reshape(LINES, WIDTH)
        elif name.startswith("file"):
            self.lines = self.mapped()

    def __len__(self):
        return LINES

    def __getitems__(self, indices):
        if self.name == "nothing":
            return indices
        if self.lines is None:
            self.lines = self.mapped()
        return [self.lines[index][0] for index in indices]

    def mapped(self):
        return np.memmap(self.path, np.uint8, mode="r", shape=(LINES, WIDTH))


def read(name, path, workers):
    """Read an epoch. The workers keep running. They are forked while there are no threads yet."""
    state["loader"] = DataLoader(
        Lines(name, path),
        1000,
        shuffle=True,
        num_workers=workers,
        persistent_workers=bool(workers),
        multiprocessing_context="fork" if workers else None,
        collate_fn=len,
    )
    assert sum(state["loader"]) == LINES


def megabytes(device, workers):
    """Return the memory of all ranks and workers. A page that k of them share counts 1/k each."""
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    assert len(processes) >= 1 + workers and dist.get_world_size() == PROCESSES
    dist.barrier()
    total = torch.tensor(sum(each.memory_full_info().pss for each in processes) / MB)
    dist.all_reduce(total)
    return total.item()


def main():
    measured, pickled = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        np.array([b"%040d" % number for number in range(LINES)]).tofile(path)
        for name in NAMES:
            for workers in (0, 2):
                prepare = partial(read, name, path, workers)
                totals = results_by_rank(megabytes, PROCESSES, workers, prepare=prepare)
                measured[name, workers] = totals[0]
            pickled[name] = len(pickle.dumps(Lines(name, path))) / MB
    rows = []
    for name in NAMES[1:]:
        extra = [measured[name, workers] - measured["nothing", workers] for workers in (0, 2)]
        cells = [*(round(each, -1) for each in extra), pickled[name]]
        rows.append([name, *(f"{cell:.0f} MB" for cell in cells)])
    print(f"{LINES:,} lines of {WIDTH} bytes, {LINES * WIDTH / MB:.0f} MB in all\n")
    head = ["data", f"{PROCESSES} processes", "with 2 forked workers each", "pickled"]
    print(table(head, rows))


if __name__ == "__main__":
    main()

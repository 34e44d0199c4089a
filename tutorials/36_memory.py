"""Measure what a dataset takes in two processes, and in two loader workers of each. Linux only.

python tutorials/36_memory.py
"""

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
NAMES = ["nothing", "list of `bytes`", "NumPy array", "file, with `np.memmap`"]
state = {}  # the loader of this process


class Lines:
    def __init__(self, name, path):
        if name == "nothing":
            self.lines = np.broadcast_to(np.zeros(WIDTH, np.uint8), (LINES, WIDTH))  # one row
        elif name.startswith("list"):
            self.lines = [b"%040d" % number for number in range(LINES)]
        elif name.startswith("NumPy"):
            self.lines = np.fromfile(path, np.uint8).reshape(LINES, WIDTH)
        else:
            self.lines = np.memmap(path, np.uint8, mode="r", shape=(LINES, WIDTH))

    def __len__(self):
        return LINES

    def __getitems__(self, indices):
        return [self.lines[index][0] for index in indices]


def read(name, path, workers):
    """Read an epoch. The workers keep running. They are forked while there are no threads yet."""
    context = "fork" if workers else None
    state["loader"] = DataLoader(
        Lines(name, path),
        1000,
        shuffle=True,
        num_workers=workers,
        persistent_workers=bool(workers),
        multiprocessing_context=context,
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
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        np.array([b"%040d" % number for number in range(LINES)]).tofile(path)
        for name in NAMES:
            for workers in (0, 2):
                prepare = partial(read, name, path, workers)
                totals = results_by_rank(megabytes, PROCESSES, workers, prepare=prepare)
                measured[name, workers] = totals[0]
    rows = []
    for name in NAMES[1:]:
        extra = [measured[name, workers] - measured["nothing", workers] for workers in (0, 2)]
        rows.append([name, *(f"{round(each, -1):.0f} MB" for each in extra)])
    print(f"{LINES:,} lines of {WIDTH} bytes, {LINES * WIDTH / MB:.0f} MB in all\n")
    print(table(["data", f"{PROCESSES} processes", "with 2 workers each"], rows))


if __name__ == "__main__":
    main()

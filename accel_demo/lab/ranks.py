"""Call a function in connected processes, and have what each of them found."""

import pickle
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy import group
from accel_demo.processes.connect import connect
from accel_demo.processes.launch import spawn


def of_every_rank(function: Callable, processes: int, *arguments, threads: int = 1) -> list:
    """What `function(device, *arguments)` returns in each of so many connected processes, by rank.

    `device` is the process's own: a GPU where there is one for each of them, else the CPU, where it
    computes on `threads` threads. The function must be importable by its module and name; arguments
    and results are pickled. Where a process fails, this one ends with its exit code. A signal that
    asks this one to stop, like Ctrl-C, ends them all.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            *(_call, processes, Path(folder), threads, function, arguments),
            preloaded=group.PRELOADED,
            stop_at_once=True,
        )
        files = [Path(folder, f"{rank}.pickle") for rank in range(processes)]
        return [pickle.loads(file.read_bytes()) for file in files]


def _call(folder: Path, threads: int, function: Callable, arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a terminal's Ctrl-C comes here too: no traceback
    torch.set_num_threads(threads)
    device = connect(group.TIME_LIMIT)
    group.check_all_have_met(device)
    result = function(device, *arguments)
    Path(folder, f"{dist.get_rank()}.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()

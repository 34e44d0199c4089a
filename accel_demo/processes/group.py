"""Call a function in connected processes, either of a launcher or newly started."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from accel_demo.processes import launch
from accel_demo.processes.connect import connect
from accel_demo.processes.environment import is_launched
from accel_demo.processes.lost_processes import report_lost_processes
from accel_demo.wording import counted

TIME_LIMIT = 60  # seconds after which a collective fails
PRELOADED = (*launch.PRELOADED, __name__)


def run_in_group(
    function: Callable, processes: int, *arguments, preloaded: tuple[str, ...] = PRELOADED
) -> None:
    """Call `function(device, *arguments)` in this many connected processes.

    `device` is the device of the process: its own GPU if each process can have one, otherwise the
    CPU. If a launcher started this process, the function is called here, in the group of that
    launch. Rank 0 prints how many processes are connected. A collective fails after `TIME_LIMIT`.
    """
    if is_launched():
        with report_lost_processes():
            _announce_and_call(function, *arguments)
        return
    launch.spawn(_announce_and_call, processes, function, *arguments, preloaded=preloaded)


def results_by_rank(
    function: Callable,
    processes: int,
    *arguments,
    threads: int = 1,
    preloaded: tuple[str, ...] = PRELOADED,
) -> list[Any]:
    """Call `function(device, *arguments)` as `run_in_group` does, and return the results by rank.

    The processes are always new, and print nothing. On the CPU, each uses `threads` threads. A
    signal to this process, such as Ctrl-C, ends all of them.
    """
    options = {"preloaded": preloaded, "stop_at_once": True}
    return launch.spawn(_call_with_threads, processes, threads, function, *arguments, **options)


def check_connection(device: torch.device) -> None:
    """Raise `RuntimeError` unless an all-gather returns each rank of the group once."""
    heard = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(heard, torch.tensor([dist.get_rank()], device=device))
    ranks = [int(rank) for rank in heard]
    if ranks != list(range(dist.get_world_size())):
        raise RuntimeError(f"the connected ranks are {ranks}")


@contextmanager
def _connected() -> Iterator[torch.device]:
    device = connect(TIME_LIMIT)
    check_connection(device)
    yield device
    dist.barrier()
    dist.destroy_process_group()


def _announce_and_call(function: Callable, *arguments) -> None:
    with _connected() as device:
        if dist.get_rank() == 0:
            where = f"{device.type} ({dist.get_backend()})"
            print(f"{counted(dist.get_world_size(), 'connected process')} on {where}\n", flush=True)
        function(device, *arguments)


def _call_with_threads(threads: int, function: Callable, *arguments) -> Any:
    torch.set_num_threads(threads)
    with _connected() as device:
        return function(device, *arguments)

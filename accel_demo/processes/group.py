"""Call a function in connected processes that a launcher or this module has started."""

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
    """Call `function(device, *arguments)` in `processes` connected processes.

    `device` is a separate GPU for each process if there are enough GPUs, otherwise the CPU. If a
    launcher started this process, the function is called in the launcher's processes instead. Rank
    0 prints the number of connected processes. Collectives time out after `TIME_LIMIT` seconds.
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
    prepare: Callable[[], None] | None = None,
    preloaded: tuple[str, ...] = PRELOADED,
) -> list[Any]:
    """Call `function(device, *arguments)` as `run_in_group` does, and return the results by rank.

    Even under a launcher, this function starts new processes. Each of them uses `threads` CPU
    threads, and calls `prepare` before it connects. Rank 0 prints nothing. If this process receives
    a stop signal such as Ctrl-C, it kills the new processes.
    """
    options = {"preloaded": preloaded, "stop_at_once": True}
    return launch.spawn(
        _prepare_and_call, processes, threads, prepare, function, *arguments, **options
    )


def check_connection(device: torch.device) -> None:
    """Raise `RuntimeError` unless an all-gather returns every rank of the group, in order."""
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


def _prepare_and_call(
    threads: int, prepare: Callable[[], None] | None, function: Callable, *arguments
) -> Any:
    torch.set_num_threads(threads)
    if prepare:
        prepare()
    with _connected() as device:
        return function(device, *arguments)

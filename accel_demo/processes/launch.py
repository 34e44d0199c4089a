"""Start connected processes on this machine, as torchrun would."""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_all_start_methods, set_forkserver_preload

import psutil
import torch

from accel_demo.errors import UserError, one_line_errors, say
from accel_demo.processes.connect import number_in, rank_environment
from accel_demo.processes.losses import report_lost_processes
from accel_demo.processes.signals import SIGNALS

PRELOADED = ["torch._dynamo"]  # the first optimizer imports it, which takes as long as torch


def spawn(
    main: Callable, world_size: int, *arguments, preloaded=PRELOADED, stop_at_once: bool = False
) -> None:
    """Call `main(*arguments)` in this many processes, as torchrun would start them on one machine.

    They meet at MASTER_PORT, or at any free port. Signals that ask to stop are passed on to them;
    with `stop_at_once`, and before all are started, they end them. On Linux a server imports the
    modules `preloaded` once, and all processes are forked from it. Elsewhere each imports them:
    Windows cannot fork, and macOS should not once its own libraries are loaded. Raises `UserError`
    where the port is taken; ends with the exit code of a process that failed.
    Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    if world_size < 1:
        raise UserError(f"--nproc must be at least 1, got {world_size}")
    port = free_port(number_in("MASTER_PORT", 0))
    if world_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: they share the cores
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    set_forkserver_preload(preloaded)
    ranks = None

    def asked_to_stop(number, frame):
        if stop_at_once or ranks is None:
            _kill_children()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            say("stopped")
            sys.exit(128 + number)
        for process in ranks.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    earlier = {number: signal.signal(number, asked_to_stop) for number in SIGNALS}
    try:
        orders = (world_size, port, main, arguments)
        ranks = torch.multiprocessing.start_processes(
            _as_rank, orders, world_size, join=False, start_method=start_method()
        )
        while not ranks.join():
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code == 2:
            sys.exit(2)  # the process has said why
        ended = error.signal_name or f"exit code {error.exit_code}"
        print(f"error: rank {error.error_index} ended by {ended}", file=sys.stderr)
        sys.exit(1)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def start_method() -> str:
    """Return how `spawn` starts processes. The variable ACCEL_DEMO_START_METHOD overrides it.

    "fork" is the quickest, but only safe in a process with one thread that has not used a GPU.
    """
    default = "forkserver" if sys.platform == "linux" else "spawn"
    chosen, known = os.environ.get("ACCEL_DEMO_START_METHOD", default), get_all_start_methods()
    if chosen not in known:
        raise UserError(f"ACCEL_DEMO_START_METHOD must be one of {', '.join(known)}, got {chosen}")
    return chosen


def free_port(port: int = 0) -> int:
    """`port` where it is free, or any free one for 0. Raises `UserError` where it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OverflowError:
            raise UserError(f"MASTER_PORT must be from 0 to 65535, got {port}") from None
        except OSError:
            raise UserError(
                f"port {port} is in use: set MASTER_PORT to another one, or leave it unset"
            ) from None
        return probe.getsockname()[1]


def _as_rank(rank: int, world_size: int, port: int, main: Callable, arguments: tuple) -> None:
    os.environ.update(rank_environment(rank, world_size, port))
    if world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a fork server has the variables of when it was started
    with one_line_errors(), report_lost_processes():
        main(*arguments)


def _kill_children() -> None:
    """End every process below this one. They first stand still, so that none starts another.

    But for Python's resource tracker, which ends by itself and cleans up after the others.
    """
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in word for word in child.cmdline()):
                    act(child)

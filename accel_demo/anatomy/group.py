"""Start the connected processes a module of this folder needs, or join those of a launcher."""

import multiprocessing
import multiprocessing.forkserver
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.errors import Parser, UserError
from accel_demo.processes.connect import connect, is_launched, number_in
from accel_demo.processes.launch import spawn, start_method
from accel_demo.processes.losses import report_lost_processes
from accel_demo.show import check_outputs

TIME_LIMIT = 60  # seconds that a process waits for any other
PRELOADED = ["torch._dynamo", "accel_demo.anatomy.group"]  # for `spawn`; an optimizer takes _dynamo


def command_line(description: str, processes: int | None = None) -> Parser:
    """A parser with `--plot`; with `--processes` too where a default is given.

    `read` parses what was typed.
    """
    parser = Parser(description)
    if processes is not None:
        help = f"how many processes to start (default: {processes})"
        parser.add_argument("--processes", type=int, metavar="N", help=help)
        parser.set_defaults(default_processes=processes)
    help = "also draw it, as .png, .svg or .pdf"
    parser.add_argument("--plot", metavar="FILE", type=Path, help=help)
    return parser


def read(parser: Parser, arguments: list[str] | None = None):
    """The options; `processes` is how many there will be, or are where a launcher has started them.

    Raises `UserError` where there is a mistake in them.
    """
    options = parser.parse_args(arguments)
    check_outputs(options)
    if hasattr(options, "processes"):
        if is_launched() and options.processes is not None:
            raise UserError("--processes is for starting without a launcher: leave it out")
        if is_launched():
            options.processes = number_in("WORLD_SIZE", 1)
        elif options.processes is None:
            options.processes = options.default_processes
        if options.processes < 1:
            raise UserError(f"--processes must be at least 1, got {options.processes}")
    return options


def run_in_group(main: Callable, processes: int, *arguments) -> None:
    """Call `main(device, *arguments)` in this many connected processes, each with its own device.

    Where a launcher has started this process, it is called here, in the group of that launch. On a
    GPU each where there are enough of them, else on the CPU. Rank 0 prints how many have met. No
    collective waits longer than `TIME_LIMIT`.
    """
    if is_launched():
        with report_lost_processes():
            _join(main, *arguments)
        return
    spawn(_join, processes, main, *arguments, preloaded=PRELOADED)


def start_server() -> None:
    """Start the server that `spawn` forks processes from, without waiting until it is ready."""
    if start_method() == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOADED)
        multiprocessing.forkserver.ensure_running()


def check_all_have_met(device: torch.device) -> None:
    """Raise `RuntimeError` unless each rank of the world can be heard by this one, once."""
    met = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(met, torch.tensor([dist.get_rank()], device=device))
    ranks = [int(rank) for rank in met]
    if ranks != list(range(dist.get_world_size())):
        raise RuntimeError(f"the ranks that have met are {ranks}")


def _join(main: Callable, *arguments) -> None:
    device = connect(TIME_LIMIT)
    check_all_have_met(device)
    if dist.get_rank() == 0:
        plural = "es" if dist.get_world_size() > 1 else ""
        where = f"{device.type} ({dist.get_backend()})"
        print(f"{dist.get_world_size()} connected process{plural} on {where}\n", flush=True)
    main(device, *arguments)
    dist.barrier()
    dist.destroy_process_group()

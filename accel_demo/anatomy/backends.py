"""Show how processes connect to each other, and what each backend needs.

python -m accel_demo.anatomy.backends
python -m accel_demo.anatomy.backends --build --plot backends.png

Without --build, the program starts two CPU processes for each init method.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.environment import is_launched, rank_environment
from accel_demo.processes.group import PRELOADED, TIME_LIMIT
from accel_demo.processes.launch import free_port, spawn

# Source: https://docs.pytorch.org/docs/stable/distributed.html#backends
BACKENDS = {  # name: (what it sends between, what it needs)
    "nccl": ("NVIDIA GPUs", "torch built for CUDA, or for ROCm with AMD GPUs; a GPU per process"),
    "gloo": ("CPUs; GPUs through the CPU's memory", "nothing more"),
    "xccl": ("Intel GPUs", "torch built for XPU"),
    "ucc": ("the devices of your UCC library", "torch built from source with UCC"),
    "mpi": ("the devices of your MPI library", "torch built from source with MPI"),
}
DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU", "xpu": "Intel GPU"}
VARIABLES = "the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
PROCESSES = 2  # how many to start for each init method


def is_built_in(backend: str) -> bool:
    """Return whether this build of torch contains the backend. The machine may lack its devices."""
    return getattr(dist, f"is_{backend}_available")()


def meet(init_method: str) -> list[tuple[int, int]]:
    """Start two processes, connect them, and return each one's (world size, sum of rank + 1).

    Connected processes return (2, 3). A process alone in its group would return (1, 1).
    """
    return spawn(_connect_and_sum, PROCESSES, init_method, preloaded=PRELOADED)


def _connect_and_sum(init_method: str) -> tuple[int, int]:
    place: dict[str, Any] = {}
    if init_method != "env://":  # the other methods need rank and world size as arguments
        place = {"rank": int(os.environ["RANK"]), "world_size": PROCESSES}
        for variable in rank_environment(0, 1, 0):
            del os.environ[variable]
    timeout = timedelta(seconds=TIME_LIMIT)
    dist.init_process_group("gloo", init_method=init_method, timeout=timeout, **place)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return world_size, int(total)


def main(options) -> None:
    if is_launched():
        raise UserError(
            "this program starts its own processes. Start it with python, without a launcher."
        )
    print(backend_table() if options.build else init_method_table())
    if options.plot:
        draw(options.plot)


def backend_table() -> str:
    rows = [
        [f"`{name}`", between, "yes" if is_built_in(name) else "no", needs]
        for name, (between, needs) in BACKENDS.items()
    ]
    return show.table(["backend", "sends between", "in your torch", "needs"], rows)


def init_method_table() -> str:
    """Connect two processes with each init method, and return a table of what each rank has."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file, port = Path(folder, "meeting").as_uri(), free_port()
        for init_method, shown, source in (
            ("env://", "env://", VARIABLES),
            (file, "file:///a/folder/that/all/see/a-new-file", "the arguments"),
            (f"tcp://127.0.0.1:{port}", "tcp://address-of-rank-0:port", "the arguments"),
        ):
            by_rank = zip(*meet(init_method), strict=True)
            rows.append([f"`{shown}`", source, *(", ".join(map(str, cell)) for cell in by_rank)])
    head = ["`init_method`", "rank and world size come from", "world size on rank 0, 1"]
    head.append("sum of rank + 1 on rank 0, 1")
    return show.table(head, rows)


def draw(path: Path) -> None:
    """Draw which backend supports which device, and which backends this build of torch contains."""
    figure = show.new_figure(6.4, 2.8)
    axes = figure.subplots()
    for top, backend in enumerate(BACKENDS):
        is_here = is_built_in(backend)
        for left, device in enumerate(DEVICES):
            carries = device in dist.Backend.backend_capability[backend]
            color = show.COLORS[0] if is_here else "#bdbdbd"
            axes.bar(left, 0.9, 0.95, top, color=color if carries else "#f2f2f2", align="edge")
            if carries:
                ink = "white" if is_here else "black"
                axes.text(left + 0.475, top + 0.45, backend, color=ink, ha="center", va="center")
    axes.set_title(f"blue: in this build (torch {torch.__version__}); gray: not in it", fontsize=10)
    axes.set_yticks([])
    axes.set_xticks([left + 0.475 for left in range(len(DEVICES))], list(DEVICES.values()))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylim(len(BACKENDS), 0)
    show.save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__, plot=True)
        help = "list the backends and what each one needs, instead of connecting processes"
        parser.add_argument("--build", action="store_true", help=help)
        main(parser.parse_args())

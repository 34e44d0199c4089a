"""List the environment variables and arguments that each launcher passes to a worker.

python tutorials/94_launchers.py
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_demo.processes.launch import run_to_end

NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
LAUNCHERS = {  # name: (command, number of processes it starts)
    "`python`": ("python {worker}", 1),
    "`mp.spawn`": ("python {worker} --start spawn", 2),
    "`debug_launcher`": ("python {worker} --start debug_launcher", 2),
    "`torchrun`": ("torchrun --standalone --nproc-per-node 2 {worker}", 2),
    "`python -m torch.distributed.launch`": (
        "python -m torch.distributed.launch --standalone --nproc_per_node 2 {worker}",
        2,
    ),
    "`accelerate launch`": (
        "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml {worker}",
        2,
    ),
}
if sys.platform == "darwin":
    del LAUNCHERS["`debug_launcher`"]  # accelerate 1.15.0 needs the network interface `lo` for it


def main() -> None:
    with ThreadPoolExecutor(2) as pool:  # two launches at a time
        started = list(pool.map(start, LAUNCHERS))
    print(f"| launcher | {' | '.join(f'`{name}`' for name in NAMES)} | added argument |")
    print("|---" * (len(NAMES) + 2) + "|")
    for launcher, reports in started:
        first = min(reports, key=lambda report: report["passed"])
        cells = ["set" if name in first["set"] else "" for name in NAMES]
        passed = " ".join(f"`{argument}`" for argument in first["passed"])
        print(f"| {launcher} | {' | '.join(cells)} | {passed} |")


def start(launcher: str) -> tuple[str, list[dict]]:
    """Run the launcher. Return its name and the reports of its workers."""
    command, processes = LAUNCHERS[launcher]
    worker = "tutorials/94_launchers.py --worker"
    result = run_to_end(command.format(worker=worker), cwd=Path(__file__).parent.parent)
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    if result.returncode != 0 or len(reports) != processes:
        raise RuntimeError(f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}")
    return launcher, reports


def worker() -> None:
    """Print the launch variables and arguments of this worker as one line of JSON.

    The line is printed in a single write, so that the output of the workers does not interleave.
    """
    own = ["--worker", "--start", "spawn", "debug_launcher"]
    passed = [argument for argument in sys.argv[1:] if argument not in own]
    report = {"set": [name for name in NAMES if name in os.environ], "passed": passed}
    print(json.dumps(report) + "\n", end="", flush=True)


def debugged() -> None:
    """Print the report. Then wait for the other process, which may still be connecting to this one.

    `debug_launcher` has already called `init_process_group`.
    """
    worker()
    import torch.distributed as dist

    dist.barrier()


def spawned(rank: int, world_size: int, port: int) -> None:
    """Print the report, set the variables that `mp.spawn` does not set, and connect."""
    worker()
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--worker" not in sys.argv:
        main()
    elif "spawn" in sys.argv:  # import torch only if needed, because it takes seconds
        import torch.multiprocessing as mp

        from accel_demo.processes.launch import free_port

        mp.spawn(spawned, args=(2, free_port()), nprocs=2)
    elif "debug_launcher" in sys.argv:
        from accelerate import debug_launcher

        debug_launcher(debugged, num_processes=2)
    else:
        worker()

"""Start every script of the gallery that hangs, in two processes, and print where each rank is.

python tutorials/50_hangs.py

Each script sets a time limit of 5 seconds, so each rank fails where it waits. Two scripts wait at
the same time: with all of them, starting would take so long that some limits would end too early.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch  # noqa: F401 (imported once, before the processes are forked)

from accel_demo import show
from accel_demo.lab.explain.catalog import pitfalls
from accel_demo.processes.launch import free_port

TUTORIALS = Path(__file__).parent
NEVER = 600  # seconds
PROCESSES = 2
AT_ONCE = 2  # scripts


def run_rank(script: Path, rank: int, port: int, output: Path) -> None:
    """Run the script as one rank, and write all that it prints to a file."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{PROCESSES}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(output.parent)  # some scripts write files
    sys.argv = ["50_where.py", f"{NEVER}", f"{script}"]
    runpy.run_path(str(TUTORIALS / "50_where.py"), run_name="__main__")


def place_in(output: Path, rank: int) -> str:
    """Return where the rank waited, or that it had ended."""
    start = f"rank {rank}: "
    lines = [line for line in output.read_text().splitlines() if line.startswith(start)]
    return lines[0].removeprefix(start) if lines else "has ended"


def start(name: str, folder: Path) -> list[BaseProcess]:
    """Start all ranks of a script."""
    script, port = TUTORIALS / f"pitfalls/{name}_broken.py", free_port()
    fork, started = multiprocessing.get_context("fork"), []
    for rank in range(PROCESSES):
        arguments = script, rank, port, folder / f"{name}-{rank}"
        started.append(fork.Process(target=run_rank, args=arguments))
        started[-1].start()
    return started


def main() -> None:
    hangs = [each for each in pitfalls() if each["symptom"] == "hangs" and "start" not in each]
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(hangs), AT_ONCE):
            names = [pitfall["name"] for pitfall in hangs[first : first + AT_ONCE]]
            started = [process for name in names for process in start(name, Path(folder))]
            for process in started:
                process.join()
        rows = [
            [
                f"[{pitfall['title']}](pitfalls/{pitfall['name']}_broken.py)",
                *(place_in(Path(folder, f"{pitfall['name']}-{rank}"), rank) for rank in range(2)),
            ]
            for pitfall in hangs
        ]
    print(show.table(["what is wrong", "rank 0", "rank 1"], rows))


if __name__ == "__main__":
    main()

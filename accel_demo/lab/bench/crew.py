"""Worker processes that stay alive between runs, so that many short runs can take turns."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from accel_demo.lab.launch import LAUNCHER_VARIABLES, LOOPBACK, kill_tree
from accel_demo.processes import free_port


class Crew:
    """`processes` connected workers with `threads` threads each. Use it in a `with` statement.

    They train on GPUs where there is one for each of them, unless `on_cpu` hides the GPUs.
    """

    def __init__(self, processes: int, threads: int, on_cpu: bool = False):
        self.processes, self.threads = processes, threads
        self.folder = tempfile.TemporaryDirectory()
        self.errors = [Path(self.folder.name, f"stderr-{rank}") for rank in range(processes)]
        own = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": LOOPBACK}
        environment = {**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": "-1"} if on_cpu else {})}
        for name in LAUNCHER_VARIABLES:
            environment.pop(name, None)
        self.workers = []
        for path in self.errors:
            with path.open("w") as stderr:
                worker = subprocess.Popen(
                    [sys.executable, "-m", "accel_demo.lab.bench.worker"],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            self.workers.append(worker)

    def run(
        self, telling: str, choices: dict, precision: str = "no", profiled=False, time_limit=300
    ) -> dict:
        """Rank 0's answer (see worker.run) to a training with these fields of TrainConfig.

        Raises `RuntimeError` where a worker dies, takes more than `time_limit` seconds, or trains
        with another number of processes or threads than this crew has.
        """
        port = free_port()
        guard = threading.Timer(time_limit, self.stop)
        guard.start()
        with tempfile.TemporaryDirectory() as run_dir:
            for rank, worker in enumerate(self.workers):
                order = {
                    "telling": telling,
                    "choices": {**choices, "run_dir": run_dir},
                    "precision": precision,
                    "rank": rank,
                    "world_size": self.processes,
                    "port": port,
                    "profiled": profiled,
                }
                worker.stdin.write(json.dumps(order) + "\n")
                worker.stdin.flush()
            lines = [worker.stdout.readline() for worker in self.workers]
        guard.cancel()
        if not all(lines):
            said = "\n".join(path.read_text() for path in self.errors)
            raise RuntimeError(f"a worker of {telling} died, or took over {time_limit} s\n{said}")
        answer = json.loads(lines[0])
        if (answer["processes"], answer["threads"]) != (self.processes, self.threads):
            raise RuntimeError(
                f"{telling}: {self.processes} processes with {self.threads} threads each were "
                f"asked for, {answer['processes']} with {answer['threads']} trained"
            )
        return answer

    def stop(self) -> None:
        """End every worker, whatever it does."""
        for worker in self.workers:
            kill_tree(worker)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()
        for worker in self.workers:
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()
        self.folder.cleanup()

"""Worker processes that stay alive between training runs, so that a short run starts quickly."""

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import PIPE
from typing import Any, TypedDict

from accel_demo.lab.hosts import Hosts
from accel_demo.processes.cleanup import kill_tree
from accel_demo.processes.environment import LOOPBACK, environment_for
from accel_demo.processes.launch import free_port, start

ON_CPU = "-1"


class WorkerResult(TypedDict):
    """Result of one training run. The first three fields are read from environment.json."""

    processes: int  # connected processes
    device: str
    threads: int  # per process
    stamps: list[float]  # time.perf_counter() after each step, from step `warm_up` on
    seconds_per_step: float  # mean
    network: str  # name of the worker's network namespace


class WorkerPool:
    """A pool of worker processes with `threads` threads each. Use it in a `with` statement.

    `gpus` is the value of CUDA_VISIBLE_DEVICES in the workers; `ON_CPU` hides all accelerators. By
    default, the workers train on GPUs if there is one for each worker. If `hosts` is given, each
    worker runs on its own host, on the CPU.
    """

    def __init__(
        self, processes: int, threads: int, gpus: str | None = None, hosts: Hosts | None = None
    ):
        self.processes, self.threads, self.hosts = processes, threads, hosts
        self.gpus = ON_CPU if hosts else gpus
        self.folder = tempfile.TemporaryDirectory()
        self.errors = [Path(self.folder.name, f"stderr-{rank}") for rank in range(processes)]
        variables = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": LOOPBACK}
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun does
        if hosts:
            variables |= hosts.variables()
            python = sys.executable  # PYTHON_EXEC may fork from a server that is not on the host
        command = [python, "-m", "accel_demo.lab.pool_worker"]
        self.workers = []
        for rank, path in enumerate(self.errors):
            with path.open("wb") as stderr:
                options = {"stdin": PIPE, "cwd": Path.cwd()}
                on_host = hosts.wrapped(rank, command) if hosts else command
                environment = environment_for(variables)
                self.workers.append(start(on_host, environment, PIPE, stderr, **options))

    def run(
        self,
        version: str,
        choices: dict,
        warm_up: int = 1,
        time_limit: float = 600,
        processes: int | None = None,
    ) -> WorkerResult:
        """Train once and return rank 0's result. `choices` are arguments of TrainConfig.

        If `processes` is given, only that many workers train. Raises
        `RuntimeError` if a worker dies or takes more than `time_limit` seconds, or if the number of
        processes, the number of threads or the device is not what was requested.
        """
        port, workers = free_port(), self.workers[:processes]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as run_dir:
            for rank, worker in enumerate(workers):
                request = {
                    "version": version,
                    "choices": {**choices, "run_dir": run_dir},
                    "rank": rank,
                    "world_size": len(workers),
                    "port": port,
                    "address": self.hosts.address if self.hosts else "127.0.0.1",
                    "on_cpu": self.gpus == ON_CPU,
                    "warm_up": warm_up,
                }
                with suppress(BrokenPipeError):  # `_lines_from` detects dead workers
                    worker.stdin.write(json.dumps(request) + "\n")
                    worker.stdin.flush()
            lines = self._lines_from(workers, version, time_limit)
        result: WorkerResult = json.loads(lines[0])
        wanted: dict[str, Any] = {"processes": len(workers), "threads": self.threads}
        if self.gpus == ON_CPU:
            wanted["device"] = "cpu"
        actual = {name: result[name] for name in wanted}
        if actual != wanted:
            raise RuntimeError(f"{version}: requested {wanted}, but trained with {actual}")
        if self.hosts:
            self.hosts.check([json.loads(line)["network"] for line in lines])
        return result

    def stop(self) -> None:
        """Kill every worker, and wait until it has exited."""
        for worker in self.workers:
            if worker.poll() is None:
                kill_tree(worker)
        for worker in self.workers:
            worker.wait()

    def _lines_from(self, workers: list, version: str, time_limit: float) -> list[str]:
        """Return one line from each worker. The workers may answer, or die, in any order."""
        deadline = time.monotonic() + time_limit
        waiting = {worker.stdout: rank for rank, worker in enumerate(workers)}
        lines: dict[int, str] = {}  # by rank
        while waiting:
            answered: list[Any] = wait(waiting, deadline - time.monotonic())
            for stdout in answered:
                lines[waiting.pop(stdout)] = stdout.readline()
            if not answered or not all(lines.values()):
                self.stop()  # the other workers would wait forever for a dead one
                reason = "died" if answered else f"took over {time_limit} s"
                errors = "\n".join(
                    path.read_text(encoding="utf-8", errors="replace") for path in self.errors
                )
                raise RuntimeError(f"{version}: a worker {reason}\n{errors}")
        return [lines[rank] for rank in sorted(lines)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()
        for worker in self.workers:
            with suppress(BrokenPipeError):
                worker.stdin.close()
            worker.stdout.close()
        self.folder.cleanup()

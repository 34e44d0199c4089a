"""Worker processes that stay alive between runs, so that many short runs can take turns."""

import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

from accel_demo.processes.environment import LOOPBACK, environment_for
from accel_demo.processes.launch import free_port, kill_tree, start

ON_CPU = "-1"


class WorkerPool:
    """`processes` connected workers with `threads` threads each. Use it in a `with` statement.

    `gpus` is what they may see, as CUDA_VISIBLE_DEVICES has it; `ON_CPU` hides every accelerator.
    Without it they train on GPUs where there is one for each of them.
    """

    def __init__(self, processes: int, threads: int, gpus: str | None = None):
        self.processes, self.threads, self.gpus = processes, threads, gpus
        self.folder = tempfile.TemporaryDirectory()
        self.errors = [Path(self.folder.name, f"stderr-{rank}") for rank in range(processes)]
        own = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": LOOPBACK}
        if gpus is not None:
            own["CUDA_VISIBLE_DEVICES"] = gpus
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun chooses it
        command = [python, "-m", "accel_demo.lab.pool_worker"]
        self.workers = []
        for path in self.errors:
            with path.open("w") as stderr:
                options = {"stdin": PIPE, "cwd": Path.cwd()}
                worker = start(command, environment_for(own), PIPE, stderr, **options)
            self.workers.append(worker)

    def run(
        self,
        telling: str,
        choices: dict,
        precision: str = "no",
        warm_up: int = 1,
        watched: str = "",
        time_limit: float = 600,
        processes: int | None = None,
    ) -> dict:
        """Rank 0's answer (see pool_worker.run) to a training with these fields of TrainConfig.

        Only the first `processes` of the pool train where that is given; the others wait for work.
        Raises `RuntimeError` where a worker dies, takes more than `time_limit` seconds, or trains
        with another number of processes or threads, or on another device, than this pool has.
        """
        port, too_long = free_port(), threading.Event()
        workers = self.workers[:processes]

        def end_of_patience():
            too_long.set()
            self.stop()

        guard = threading.Timer(time_limit, end_of_patience)
        guard.daemon = True
        guard.start()
        try:
            with (
                tempfile.TemporaryDirectory() as run_dir,
                ThreadPoolExecutor(len(workers)) as readers,
            ):
                for rank, worker in enumerate(workers):
                    order = {
                        "telling": telling,
                        "choices": {**choices, "run_dir": run_dir},
                        "precision": precision,
                        "rank": rank,
                        "world_size": len(workers),
                        "port": port,
                        "on_cpu": self.gpus == ON_CPU,
                        "warm_up": warm_up,
                        "watched": watched,
                    }
                    with suppress(BrokenPipeError):  # it has died: its answer will be empty
                        worker.stdin.write(json.dumps(order) + "\n")
                        worker.stdin.flush()
                lines = list(readers.map(self._answer_of, workers))
        finally:
            guard.cancel()
        if not all(lines):
            reason = f"took over {time_limit} s" if too_long.is_set() else "died"
            said = "\n".join(path.read_text() for path in self.errors)
            raise RuntimeError(f"{telling}: a worker {reason}\n{said}")
        answer = json.loads(lines[0])
        wanted: dict[str, Any] = {"processes": len(workers), "threads": self.threads}
        if self.gpus == ON_CPU:
            wanted["device"] = "cpu"
        found = {name: answer[name] for name in wanted}
        if found != wanted:
            raise RuntimeError(f"{telling}: asked for {wanted}, but trained with {found}")
        return answer

    def stop(self) -> None:
        """End every worker, whatever it does."""
        for worker in self.workers:
            if worker.poll() is None:
                kill_tree(worker)

    def _answer_of(self, worker: Any) -> str:
        line = worker.stdout.readline()
        if not line:
            self.stop()  # the others would wait for it
        return line

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()
        for worker in self.workers:
            worker.wait()
            with suppress(BrokenPipeError):
                worker.stdin.close()
            worker.stdout.close()
        self.folder.cleanup()

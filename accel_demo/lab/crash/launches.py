"""One launch of a training as a user types it, watched from outside, and killed at any moment."""

import json
import re
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.processes.launch import start
from accel_demo.run.checkpoint import UNFINISHED
from accel_demo.run.folder import read_json

TIME_LIMIT = 180  # seconds for a launch
TIME_TO_END = 60  # seconds in which a launch ends once one of its processes was killed
MARK = "ACCEL_DEMO_CRASH"  # an environment variable that every process of a launch inherits


class Launch:
    """A launcher, the ranks it starts and their loader workers; none of them outlives the `with`.

    `points` are (moment, step) of each optimizer step of this launch, as metrics.jsonl tells it;
    moments are those of `time.monotonic()`.
    """

    def __init__(self, command: list[str], run: Path, processes: int, output: Path):
        """Start `command`, which trains in the folder `run`; `output` becomes its stdout."""
        self.command, self.run, self.processes = command, run, processes
        self.stdout, self.stderr = output, output.with_suffix(".stderr")
        self.points: list[tuple[float, int]] = []
        self.ranks: dict[int, psutil.Process] = {}
        self.ranks_seen_at = self.killed_at = self.ended_at = None
        self.was_saving = False  # when it was killed
        self.steps_at_kill = 0
        self.mark = uuid.uuid4().hex
        self.bytes_read = _size(run / "metrics.jsonl") or 0
        environment = environment_for({**QUIET, "PYTHONUNBUFFERED": "1", MARK: self.mark})
        self.started_at, self.date = time.monotonic(), time.time()
        with open(self.stdout, "w") as stdout, open(self.stderr, "w") as stderr:
            self.launcher = start(command, environment, stdout, stderr, real=True)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.launcher.kill()
        self.launcher.wait()
        while left := self._marked():  # again: one may have started another meanwhile
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)

    @property
    def step(self) -> int:
        """The last optimizer step that this launch has trained, or 0 where it has not yet."""
        return self.points[-1][1] if self.points else 0

    def watch(self, until: Callable[[], bool], pause: float = 0.001) -> None:
        """Read along until `until()` is true, asking every `pause` seconds.

        Raises `RuntimeError` with the output where the launch ends before that, or takes too long.
        """
        while not until():
            self._look()
            if self.launcher.poll() is not None:
                self._look()
                if not until():
                    self.fail(f"ended by itself with exit code {self.launcher.returncode}")
                return
            if time.monotonic() - self.started_at > TIME_LIMIT:
                self.fail(f"took over {TIME_LIMIT} s")
            time.sleep(pause)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written. What an earlier launch has left is older."""
        try:
            written_at = (self.run / "checkpoints" / UNFINISHED).stat().st_mtime
        except FileNotFoundError:
            return False
        return written_at > self.date

    def kill(self, rank: int) -> None:
        """SIGKILL for this rank alone. Gives back when every process of the launch is gone.

        Raises `RuntimeError` where the launch goes on without it, or a rank outlives the launcher.
        """
        self.ranks[rank].kill()
        self.was_saving = self.is_saving()
        self.killed_at = time.monotonic()
        self._look()
        self.steps_at_kill = len(self.points)
        try:
            self.launcher.wait(TIME_TO_END)
        except subprocess.TimeoutExpired:
            self.fail(f"went on for {TIME_TO_END} s after rank {rank} was killed")
        if self.launcher.returncode == 0:
            self.fail("was over before it could be killed")
        deadline = time.monotonic() + 10
        while alive := [process for process in self.ranks.values() if _is_alive(process)]:
            if time.monotonic() > deadline:
                self.fail(f"has left {alive} behind after rank {rank} was killed")
            time.sleep(0.01)
        self.ended_at = time.monotonic()
        self.__exit__()  # the loader workers of a rank that is gone would end some seconds later
        self._look()

    def wait(self) -> None:
        """Wait for the end of a launch that nobody kills. Raises `RuntimeError` where it fails."""
        self.watch(lambda: self.launcher.poll() is not None)
        self._look()
        if self.launcher.returncode != 0:
            self.fail(f"ended with exit code {self.launcher.returncode}")

    def resumed(self) -> tuple[Path | None, int] | None:
        """The checkpoint this launch has gone on from, and its step; (None, 0) for the beginning.

        None where the launch was over before it had said so, or trained a step.
        """
        said = re.search(r"^resumed from (.+), after step (\d+)$", self.stdout.read_text(), re.M)
        if said:
            return Path(said[1]), int(said[2])
        return (None, 0) if self.points else None

    def connected(self) -> bool:
        """Whether the processes had met and said how many they are.

        Raises `RuntimeError` where they are not as many as asked for, or not on the CPU.
        """
        path = self.run / "environment.json"
        if not path.exists() or path.stat().st_mtime < self.date:
            if self.points:
                self.fail("trained without writing environment.json")
            return False
        found = read_json(path)
        if (found["processes"], found["device"]) != (self.processes, "cpu"):
            self.fail(f"had {found['processes']} connected processes on {found['device']}")
        return True

    def fail(self, reason: str) -> None:
        """Raise `RuntimeError` with the reason and what the launch has said."""
        said = self.stdout.read_text()[-2000:] + self.stderr.read_text()[-4000:]
        raise RuntimeError(f"`{' '.join(self.command)}` {reason}\n{said}")

    def _look(self) -> None:
        """Read the new lines of metrics.jsonl, and find the ranks as long as they are not there."""
        if len(self.ranks) < self.processes and self.killed_at is None:
            self._find_ranks()
        path, now = self.run / "metrics.jsonl", time.monotonic()
        size = _size(path) or 0
        if size <= self.bytes_read:  # shorter: a run that is resumed drops what it will do again
            self.bytes_read = size
            return
        with open(path, "rb") as file:
            file.seek(self.bytes_read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.bytes_read += len(text)
        for line in text.splitlines():
            metrics = json.loads(line)
            if "train_loss" in metrics:
                self.points.append((now, metrics["step"]))

    def _find_ranks(self) -> None:
        """The launcher's own children that run the train file. (Loader workers are theirs.)"""
        train_file = next(word for word in self.command if word.endswith(".py"))
        with suppress(psutil.Error):
            for process in psutil.Process(self.launcher.pid).children():
                words = process.cmdline()
                if train_file in words and not words[1].endswith(self.command[0]):
                    self.ranks[int(process.environ().get("RANK", "0"))] = process
        if len(self.ranks) == self.processes:
            self.ranks_seen_at = time.monotonic()
        time.sleep(0.02)

    def _marked(self) -> list[psutil.Process]:
        """The processes of this launch. (One that is ending has no environment any more.)"""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

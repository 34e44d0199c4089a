"""Launch a training run as a user would, watch it from outside, and kill one of its ranks."""

import json
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil

from accel_demo.lab.crash.result import Kill, LaunchResult
from accel_demo.processes.cleanup import kill_all
from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.processes.launch import STARTER, start
from accel_demo.run.checkpoint import UNFINISHED
from accel_demo.run.folder import read_json
from accel_demo.run.manifest import Damaged, checkpoints_of, verify

TIME_LIMIT = 180  # seconds that a launch may take
TIME_TO_END = 60  # seconds that a launch may continue after one of its ranks was killed
MARK = "ACCEL_DEMO_CRASH"  # environment variable that identifies the processes of a launch


class Launch:
    """A launcher, its ranks and their DataLoader workers. Leaving the `with` block kills them.

    `points` contains a (seconds since the start, step) pair for each step in metrics.jsonl.
    """

    def __init__(self, command: list[str], run: Path, processes: int):
        """Start `command` with `run` as its run folder."""
        self.command = [*command, "--run-dir", str(run)]
        self.run, self.processes = run, processes
        self.points: list[tuple[float, int]] = []
        self.ranks: dict[int, psutil.Process] = {}
        self.ranks_seen_at = 0.0  # seconds since the start; 0 until all ranks are found
        self.killed: Kill | None = None
        self.mark = uuid.uuid4().hex
        self.stdout, self.stderr = (run.with_suffix(f".{self.mark}{number}") for number in (1, 2))
        self.bytes_read = len(self._metrics())
        environment = environment_for({**QUIET, "PYTHONUNBUFFERED": "1", MARK: self.mark})
        environment.pop(STARTER, None)  # `_find_ranks` needs a launcher that is started normally
        self.started_at, self.date = time.monotonic(), time.time()
        with open(self.stdout, "wb") as stdout, open(self.stderr, "wb") as stderr:
            self.launcher = start(self.command, environment, stdout, stderr)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.launcher.kill()
        self.launcher.wait()
        while remaining := self._marked():  # in a loop, because they may start new processes
            kill_all(remaining)
            psutil.wait_procs(remaining, timeout=5)

    @property
    def step(self) -> int:
        """The last optimizer step of this launch, or 0 before the first step."""
        return self.points[-1][1] if self.points else 0

    @property
    def has_ended(self) -> bool:
        return self.launcher.poll() is not None

    def seconds(self) -> float:
        """Return the seconds since the start of this launch."""
        return time.monotonic() - self.started_at

    def watch(self, until: Callable[[], object], pause: float = 0.001) -> None:
        """Read the metrics every `pause` seconds until `until()` is true.

        Raises `RuntimeError` if the launch exits before that, or runs longer than `TIME_LIMIT`.
        """
        while not until():
            has_ended = self.has_ended
            self._look()
            if has_ended and not until():
                self.fail(f"ended unexpectedly with exit code {self.launcher.returncode}")
            if self.seconds() > TIME_LIMIT:
                self.fail(f"ran for more than {TIME_LIMIT} s")
            time.sleep(pause)

    def is_saving(self) -> bool:
        """Return whether this launch is writing a checkpoint, or was killed while writing one.

        An unfinished checkpoint from an earlier launch is ignored.
        """
        try:
            written_at = (self.run / "checkpoints" / UNFINISHED).stat().st_mtime
        except FileNotFoundError:
            return False
        return written_at > self.date

    def wait(self) -> None:
        """Wait until the launch exits. Raises `RuntimeError` if it fails."""
        self.watch(lambda: self.has_ended)
        self._look()
        if self.launcher.returncode != 0:
            self.fail(f"ended with exit code {self.launcher.returncode}")

    def measure_phases(self) -> dict[str, float]:
        """Watch until the launch exits. Return the usual duration of each phase in seconds."""
        saves = []
        while not self.has_ended:
            self.watch(lambda: self.is_saving() or self.has_ended)
            began_at = self.seconds()
            self.watch(lambda: not self.is_saving())
            if not self.has_ended:
                saves.append(self.seconds() - began_at)
        self.wait()
        self.has_connected()
        moments = [seconds for seconds, _ in self.points]
        return {
            "step": statistics.median(b - a for a, b in zip(moments, moments[1:], strict=False)),
            "save": sorted(saves)[len(saves) // 4],  # low, so that few kills happen after the save
            "start-up": moments[0] - self.ranks_seen_at,
        }

    def kill(self, kill: Kill, usual_seconds: dict[str, float]) -> None:
        """Send SIGKILL to one rank at the planned moment, and wait until all processes have exited.

        Raises `RuntimeError` if the launch continues without the rank, or if another rank is still
        running after the launcher has exited.
        """
        self._wait_for_moment(kill, usual_seconds)
        self.ranks[kill.rank].kill()
        was_saving, killed_at = self.is_saving(), self.seconds()
        self._look()
        phase = "save" if was_saving else "step" if self.points else "start-up"
        self.killed = replace(kill, actual_phase=phase, seconds=killed_at)
        try:
            self.launcher.wait(TIME_TO_END)
        except subprocess.TimeoutExpired:
            self.fail(f"continued for {TIME_TO_END} s after rank {kill.rank} was killed")
        if self.launcher.returncode == 0:
            self.fail("finished before it could be killed")
        deadline = time.monotonic() + 10
        while alive := set(self.ranks.values()).intersection(self._marked()):
            if time.monotonic() > deadline:
                self.fail(f"left {alive} running after rank {kill.rank} was killed")
        self.__exit__()  # kills the DataLoader workers, which may outlive their rank
        self._look()

    def _wait_for_moment(self, kill: Kill, usual_seconds: dict[str, float]) -> None:
        """Wait until the planned moment. For a kill during start-up, wait at most until step 1."""
        self.watch(lambda: self.ranks_seen_at)
        if kill.planned_phase == "start-up":
            moment = self.seconds() + kill.fraction * usual_seconds["start-up"]
            self.watch(lambda: self.points or self.seconds() >= moment)
            return
        self.watch(lambda: self.points and self.step >= kill.step)
        if kill.planned_phase == "save":
            self.watch(self.is_saving, pause=0.0003)
        moment = self.seconds() + kill.fraction * usual_seconds[kill.planned_phase]
        self.watch(lambda: self.seconds() >= moment, pause=0.0003)

    def result(self, earlier: list[LaunchResult], first_start: float) -> LaunchResult:
        """Return the result of this launch. `earlier` contains the results of earlier launches.

        `first_start` is the value of `time.monotonic()` when the first launch was started.
        """
        has_connected = self.has_connected()
        resumed_from, resumed_after_step = None, 0 if self.points else None
        start = read_json(self.run / "start.json") if has_connected else {}
        if start.get("checkpoint"):
            resumed_from, resumed_after_step = start["checkpoint"], start["step"]
        known = earlier[-1].complete_checkpoints if earlier else []
        newest = known[0] if known else None
        last_step = max((step for launch in earlier for _, step in launch.points), default=0)
        complete, damaged = [], []
        for checkpoint in checkpoints_of(self.run):
            try:
                verify(checkpoint)
                complete.append(str(checkpoint))
            except Damaged as reason:
                damaged.append(f"{checkpoint}: {reason}")
        return LaunchResult(
            started_at=self.started_at - first_start,
            has_connected=has_connected,
            resumed_after_step=resumed_after_step,
            resumed_from=resumed_from,
            used_newest_checkpoint=resumed_after_step is None or resumed_from == newest,
            used_damaged_checkpoint=resumed_from is not None and resumed_from not in known,
            points=self.points,
            replayed_steps=max(0, min(self.step, last_step) - (resumed_after_step or 0)),
            kill=self.killed,
            complete_checkpoints=complete,
            damaged_checkpoints=damaged,
            left_unfinished_checkpoint=self.is_saving(),
        )

    def has_connected(self) -> bool:
        """Return whether the processes have connected and written environment.json.

        Raises `RuntimeError` if an unexpected number of processes connected, if they do not use the
        CPU, or if they trained without writing the file.
        """
        path = self.run / "environment.json"
        if not path.exists() or path.stat().st_mtime < self.date:
            if self.points:
                self.fail("trained without writing environment.json")
            return False
        environment = read_json(path)
        processes, device = environment["processes"], environment["device"]
        if (processes, device) != (self.processes, "cpu"):
            self.fail(f"unexpectedly connected {processes} processes on {device}")
        return True

    def fail(self, reason: str) -> NoReturn:
        """Raise `RuntimeError` with the reason and the output of the launch."""
        output = self.stdout.read_bytes()[-2000:] + self.stderr.read_bytes()[-4000:]
        raise RuntimeError(
            f"`{' '.join(self.command)}` {reason}\n{output.decode(errors='replace')}"
        )

    def _look(self) -> None:
        """Read the new lines of metrics.jsonl, and search for ranks that are not yet found."""
        if len(self.ranks) < self.processes:
            self._find_ranks()
        text, seconds = self._metrics(), self.seconds()
        lines = text[self.bytes_read : text.rfind(b"\n") + 1]
        # A resumed run deletes the lines of the steps that it repeats, so the file can shrink.
        self.bytes_read = min(self.bytes_read + len(lines), len(text))
        for metrics in map(json.loads, lines.splitlines()):
            if "train_loss" in metrics:
                self.points.append((seconds, metrics["step"]))

    def _metrics(self) -> bytes:
        try:
            return (self.run / "metrics.jsonl").read_bytes()
        except FileNotFoundError:
            return b""

    def _find_ranks(self) -> None:
        """Find the ranks: the launcher's direct children that run the train file."""
        train_file = next(word for word in self.command if word.endswith(".py"))
        with suppress(psutil.Error):
            for process in psutil.Process(self.launcher.pid).children():
                words = process.cmdline()
                if train_file in words and not words[1].endswith(self.command[0]):
                    self.ranks[int(process.environ().get("RANK", "0"))] = process
        if len(self.ranks) == self.processes:
            self.ranks_seen_at = self.seconds()
        time.sleep(0.02)

    def _marked(self) -> list[psutil.Process]:
        """Return the processes that have this launch's ID in their environment."""
        marked = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    marked.append(process)
        return marked

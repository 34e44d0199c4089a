"""Follow the audited command: print progress, notice a hang, and end the run in time."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from accel_demo.errors import say
from accel_demo.lab.course.originals import PACKAGE
from accel_demo.lab.observed.keeper import files_of
from accel_demo.lab.observed.places import short_path, text_of
from accel_demo.lab.observed.ranks import Rank, read_launches
from accel_demo.observer.copies import Restored, remove_copies, restore
from accel_demo.processes.cleanup import (
    SIGNALS,
    adopt_orphans,
    has_ended,
    kill_descendants,
    sigterm_raises,
)
from accel_demo.processes.launch import start
from accel_demo.wording import counted

SILENCE = 8.0  # seconds without any event
SAMPLE = 2.0  # seconds in which no process may compute or wait for a core
BUSY = 0.1  # seconds of both together that are less than work
ANSWER_TIMEOUT = 5.0  # seconds
POLL_INTERVAL = 0.2


def running(launch: list[Rank]) -> list[Rank]:
    return [rank for rank in launch if rank.end is None and psutil.pid_exists(rank.pid)]


def ignore_stop_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class ObservedCommand:
    """A running audit. `folder` contains the events, the copies and the result."""

    def __init__(self, folder: Path, plan: dict, time_limit: float):
        self.folder, self.plan, self.time_limit = folder, plan, time_limit
        self.hang = self.out_of_time = False
        self.seconds_to_notice = 0.0
        # Lines about ranks that wait outside a collective, and the number of bytes of their events
        self.outside: dict[str, tuple[Path, int]] = {}
        self.asked_at = 0.0
        self.read_up_to: dict[Path, int] = {}  # bytes of each file that were searched for steps
        self.steps: dict[Path, int] = {}
        self.keeper: subprocess.Popen | None = None
        self.not_restored: dict[str, str] = {}  # maps files to the reasons
        self.shown = 0  # characters of the progress that are on the terminal

    def run(self) -> dict:
        """Run the command to its end. Return the keeper's result."""
        adopt_orphans()  # the command's processes, if the keeper is killed
        with sigterm_raises(KeyboardInterrupt):
            try:
                self.start_keeper()
                self.follow()
                return self.end()
            except BaseException:
                self.end()
                raise

    def start_keeper(self) -> None:
        command = [sys.executable, "-m", "accel_demo.lab.observed.keeper", str(self.folder)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.keeper = start(
            command,
            environment,
            subprocess.DEVNULL,
            None,
            stdin=subprocess.PIPE,
            cwd=PACKAGE.parent,  # not the reader's folder, whose files might hide modules
            new_session=True,
        )
        assert self.keeper.stdin
        with suppress(BrokenPipeError):
            self.keeper.stdin.write(json.dumps(self.plan | {"audit": os.getpid()}) + "\n")
            self.keeper.stdin.flush()

    def end(self) -> dict:
        """Wait until the keeper has ended the command and put the files back."""
        ignore_stop_signals()
        self.erase_progress()
        if self.keeper is None:
            return {}
        assert self.keeper.stdin
        with suppress(BrokenPipeError):
            self.keeper.stdin.close()
        self.keeper.wait()
        result = self.folder / "result.json"
        ended = (
            json.loads(result.read_text(encoding="utf-8"))
            if result.exists()
            else self.replace_keeper()
        )
        self.not_restored = ended["not_restored"]
        return ended

    def replace_keeper(self) -> dict:
        """Do what a keeper that was killed has not done."""
        kill_descendants()
        restored = Restored() if self.plan["keep"] else restore(str(self.folder))
        remove_copies(str(self.folder), restored.kept)
        error = (
            "the audit's own process was killed, or could not write its result. "
            "The command was ended, and its files were put back."
        )
        return {"code": None, "error": error} | files_of(restored)

    def follow(self) -> None:
        assert self.keeper
        begun = time.monotonic()
        shown = 0.0
        while self.keeper.poll() is None:
            time.sleep(POLL_INTERVAL)
            if time.monotonic() > begun + self.time_limit:
                self.out_of_time = True
                self.ask(running(self.running_launch()))
                return
            if time.monotonic() > shown + 1:
                shown = time.monotonic()
                self.show_progress(time.monotonic() - begun)
            if self.is_silent() and self.is_idle():
                self.look_for_a_hang()
                if self.hang:
                    return

    def show_progress(self, seconds: float) -> None:
        """Print the number of optimizer steps: in one line of a terminal, or every 10 seconds."""
        for file in self.folder.glob("*.jsonl"):
            with open(file, "rb") as events:
                events.seek(self.read_up_to.get(file, 0))
                new = events.read()
            self.read_up_to[file] = self.read_up_to.get(file, 0) + len(new)
            self.steps[file] = self.steps.get(file, 0) + new.count(b'{"kind": "step"')
        steps = counted(max(self.steps.values(), default=0), "optimizer step")
        line = f"{seconds:3.0f} s, {steps}"
        if sys.stderr.isatty():
            self.erase_progress()
            print(line, end="", file=sys.stderr, flush=True)
            self.shown = len(line)
        elif seconds > 5 and round(seconds) % 10 == 0:
            say(line)

    def erase_progress(self) -> None:
        """Erase the line about the progress from a terminal, so that the next text replaces it."""
        print(f"\r{' ' * self.shown}\r" * bool(self.shown), end="", file=sys.stderr, flush=True)
        self.shown = 0

    def last_event(self) -> float:
        """Return the time of the last event of any rank, or infinity if there is none."""
        times = [file.stat().st_mtime for file in self.folder.glob("*.jsonl")]
        return max(times, default=float("inf"))

    def is_silent(self) -> bool:
        """Return True if no rank has written an event, or was asked, for `SILENCE` seconds."""
        return time.time() - max(self.last_event(), self.asked_at) > SILENCE

    def is_idle(self) -> bool:
        """Return True if no process of the command computes, waits for a core, starts or ends."""
        before = self.work()
        time.sleep(SAMPLE)
        after = self.work()
        worked = sum(after.values()) - sum(before.values())
        return self.is_silent() and before.keys() == after.keys() and worked < BUSY

    def work(self) -> dict[int, float]:
        """Map each process to the seconds that it has computed, or waited for a core."""
        assert self.keeper
        seconds: dict[int, float] = {}
        with suppress(psutil.Error):
            for process in psutil.Process(self.keeper.pid).children(recursive=True):
                seconds[process.pid] = 0.0
                for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                    with suppress(OSError, ValueError):
                        computed, waited, *_ = map(int, file.read_text(encoding="utf-8").split())
                        seconds[process.pid] += (computed + waited) / 1e9
        return seconds

    def running_launch(self) -> list[Rank]:
        """Return the ranks of the first launch that connects its ranks and is not over."""
        for launch in read_launches(self.folder):
            if running(launch) and any(rank.of("connecting", "connected") for rank in launch):
                return launch
        return []

    def ask(self, ranks: list[Rank]) -> None:
        """Let the ranks write their collectives and stacks, and wait until they have."""
        self.asked_at = time.time()
        for rank in ranks:
            (self.folder / f"{rank.pid}.answer").unlink(missing_ok=True)
            with suppress(OSError):
                pipe = os.open(self.folder / f"{rank.pid}.ask", os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"?")
                os.close(pipe)
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while time.monotonic() < deadline:
            if all((self.folder / f"{rank.pid}.answer").exists() for rank in ranks):
                return
            time.sleep(0.05)

    def look_for_a_hang(self) -> None:
        """Set `hang` if every running rank waits in a collective."""
        self.ask(running(self.running_launch()))
        launch = self.running_launch()
        ranks = running(launch)
        outside = [rank for rank in ranks if rank.waits_in is None]
        self.hang = bool(ranks) and not outside and not self.is_rank_unseen(launch)
        self.seconds_to_notice = round(time.time() - self.last_event(), 1)
        for rank in outside:
            if rank.waiting_line:
                file, number, _ = rank.waiting_line
                where = f"{short_path(file)}:{number}: {text_of(rank.waiting_line)}"
                self.warn(f"rank {rank.number} waits at {where}", rank)

    def is_rank_unseen(self, launch: list[Rank]) -> bool:
        """Return True if another rank of a launch may be running that has recorded nothing so far.

        It may, for example, load its data, while the other ranks wait for it.
        """
        if len(launch) >= max(rank.requested_world for rank in launch):
            return False
        assert self.keeper
        above = {rank.pid for rank in launch}  # processes that may have started it
        for rank in running(launch):
            with suppress(psutil.Error):
                above |= {parent.pid for parent in psutil.Process(rank.pid).parents()}
        descendants = []
        with suppress(psutil.Error):  # the keeper has just ended
            descendants = psutil.Process(self.keeper.pid).children(recursive=True)
        for process in descendants:
            with suppress(psutil.Error):
                is_helper = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
                if process.ppid() in above and process.pid not in above:
                    if not is_helper and not has_ended(process):
                        return True
        return False

    @property
    def waits(self) -> list[str]:
        """Lines about the ranks that have not gone on since they were seen to wait."""
        return [line for line, (file, size) in self.outside.items() if file.stat().st_size == size]

    def warn(self, line: str, rank: Rank) -> None:
        file = self.folder / f"{rank.pid}.jsonl"
        if line not in self.outside:
            self.erase_progress()
            say(line)
        self.outside[line] = file, file.stat().st_size

"""Stop a run after a complete step when a signal arrives, and build the command to resume it."""

import os
import shlex
import signal
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

import psutil
import torch.distributed as dist

from accel_demo.processes.cleanup import SIGNALS, signals_to_catch

LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun", "torch.distributed.run"}
was_asked = False  # whether this process has received a stop signal since `catch_stop_signals`
REPEAT_TIMEOUT = 5  # a launcher may forward the same signal again for this many seconds


def catch_stop_signals(log_every: int) -> "StopSignals":
    """Record stop signals from now on, instead of exiting at once.

    The signals are caught as long as the returned object exists. A second signal more than
    `REPEAT_TIMEOUT` seconds after the first one has its usual effect. The signals of a terminal,
    SIGINT and SIGHUP, remain ignored if they are: `nohup` ignores SIGHUP, and a script ignores
    SIGINT in its background commands.
    """
    global was_asked
    was_asked = False
    stop_signals = StopSignals(log_every)
    reference = weakref.ref(stop_signals)  # the signal handler outlives the run

    def ask(number, frame):
        stop = reference()
        if stop is None or stop.is_asked_again():
            signal.signal(number, earlier[number])
            os.kill(os.getpid(), number)

    earlier = {number: signal.signal(number, ask) for number in signals_to_catch()}
    return stop_signals


class StopSignals:
    """The stop signals of a run. They stop all its processes after the same step.

    The process that receives the signal chooses the last step and writes its number to the store.
    It has to choose a step that no process has finished yet. With gloo, all processes finish a step
    together, because they average its gradients. So the next step is the last. With NCCL, a process
    only queues work on its GPU, and can run ahead of the others. They only wait for each other when
    they reduce the metrics, every `log_every` steps. So the first step after the next reduction is
    the last. All processes read the store in every step, which is cheaper than a collective.
    """

    def __init__(self, log_every: int):
        self.asked_at, self.log_every = None, log_every

    def after(self, step: int) -> bool:
        """Return True if the run stops after this step. Every process calls this in every step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.asked_at is not None
        store = dist.distributed_c10d._get_default_store()
        if store.check(["last_step"]):
            return step >= int(store.get("last_step"))
        if self.asked_at is not None:
            next_metrics = step - step % self.log_every + self.log_every
            last = step + 1 if dist.get_backend() == "gloo" else next_metrics + 1
            store.set("last_step", str(last))
            store.get("last_step")  # wait for the store: `set` returns before the store has it
        return False

    def is_asked_again(self) -> bool:
        """Record a stop signal. Return True if the first one came over `REPEAT_TIMEOUT` s ago."""
        global was_asked
        was_asked = True
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        return time.monotonic() - self.asked_at > REPEAT_TIMEOUT


def ignore_signals(worker: int) -> None:
    """Ignore stop signals in a loader worker, which exits when its training process exits.

    Ctrl-C and the closing of a terminal send a signal to the loader workers, too.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def resume_command(run: Path) -> str:
    """Return the command that resumes the run, based on the command that started it."""
    words = [sys.executable, *sys.argv]
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            line = parent.cmdline()
            started_by = {Path(word).name for word in line[:3]}
            if sys.argv[0] in line and started_by & {*LAUNCHERS, Path(sys.argv[0]).name}:
                words = line
    if Path(words[0]).name.startswith("python"):
        words = words[1:] if os.access(words[1], os.X_OK) else ["python", *words[1:]]
    words[0] = Path(words[0]).name if os.path.isabs(words[0]) else words[0]
    kept, words = [], iter(words)
    for word in words:
        if word in ("--resume", "--run-dir"):
            next(words, None)
        elif not word.startswith(("--resume=", "--run-dir=")):
            kept.append(word)
    return shlex.join([*kept, "--run-dir", str(run), "--resume", "auto"])

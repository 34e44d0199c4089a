"""How a run stops after a step if a signal asks it to, and which command resumes it."""

import os
import platform
import shlex
import signal
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

import psutil
import torch.distributed as dist

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1")  # kill, Ctrl-C, Slurm before it takes the node
    if hasattr(signal, name)  # Windows has no SIGUSR1
]
LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun", "torch.distributed.run"}
PATIENCE = 5  # seconds, for a launcher to pass a signal on


class StopSignals:
    """Turns a request to stop into a step after which all processes stop.

    Whoever is asked leaves word in the store where the processes have met: which step is the last.
    It has to be one that nobody can be past. With gloo all finish a step together, because they
    share its gradients: then it is the next step. With NCCL a process only tells its GPU what to
    share, and may be ahead of the others until the next metrics, every `log_every` steps, for
    which all wait: then it is the step after those. Looking into the store is cheaper than a
    collective in every step, and waits for no GPU.
    """

    def __init__(self, log_every: int):
        self.asked_at, self.log_every = None, log_every
        myself = weakref.ref(self)  # a handler is never forgotten, but this is when the run is over

        def ask(number, frame):
            stop = myself()
            if stop is None or stop.is_asked_again():
                signal.signal(number, earlier[number])
                os.kill(os.getpid(), number)

        earlier = {number: signal.signal(number, ask) for number in SIGNALS}
        if dist.is_initialized():  # for those who may miss this process one day
            store = dist.distributed_c10d._get_default_store()
            store.set(f"process/{dist.get_rank()}", f"{platform.node() or '-'} {os.getpid()}")

    def after(self, step: int) -> bool:
        """Whether to stop after this optimizer step. Every process calls it after every step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.asked_at is not None
        store = dist.distributed_c10d._get_default_store()
        if store.check(["last_step"]):
            return step >= int(store.get("last_step"))
        if self.asked_at is not None:
            next_metrics = step - step % self.log_every + self.log_every
            last = step + 1 if dist.get_backend() == "gloo" else next_metrics + 1
            store.set("last_step", str(last))
        return False

    def is_asked_again(self) -> bool:
        """Note a request to stop; True where there was one `PATIENCE` seconds ago: it is meant."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        return time.monotonic() - self.asked_at > PATIENCE


def ignore_signals(worker: int) -> None:
    """For loader workers, which get a terminal's Ctrl-C too: they end when their process does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def resume_command(run: Path) -> str:
    """What to type to go on with the run in this folder: the command it was started with, again."""
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

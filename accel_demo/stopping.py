"""How a run ends: in order, because a signal asks it to, or because another process is gone."""

import os
import platform
import shlex
import signal
import sys
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path

import psutil
import torch.distributed as dist

from accel_demo.errors import say

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1")  # kill, Ctrl-C, Slurm before it takes the node
    if hasattr(signal, name)  # Windows has no SIGUSR1
]
# What gloo and NCCL say when another process is gone or late; torch passes it on as RuntimeError.
SIGNS = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun", "torch.distributed.run"}
TRAIN_FILES = ("train.py", "train_plain.py", "train_dp.py", "train_ddp.py")
PATIENCE = 5  # seconds, for a launcher to pass a signal on, and for others to notice a loss


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


def lost_processes(error: RuntimeError) -> str | None:
    """One line on which process is gone or stuck, where `error` comes from a collective.

    The processes that have noticed tell each other so in the store where they have met; who does
    not is missing. Only the first of those that are left gives the line; the others give "".
    """
    said = str(error)
    if not _is_about_processes(error) or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    timed_out = "imed out" in said or "imeout" in said
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    where = _place_in_the_training(error)
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set(f"left/{rank}", where)
        store.check([f"left/{rank}"])
    except dist.DistError:
        keeper = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        return f"{keeper} has died; rank {rank} noticed {where}. Go on with --resume auto"
    try:
        missing = _missing(store, ranks, timed_out)
    except dist.DistError:  # the process that keeps the store has given the line, and left
        return ""
    if min(set(ranks) - set(missing)) != rank:
        return ""
    if not missing:
        return f"all processes are there, but failed {where}: {said.splitlines()[0]}"
    names = ", ".join(str(number) for number in missing)
    names = f"rank {names} has" if len(missing) == 1 else f"ranks {names} have"
    what = "not answered within --collective-timeout, and may hang" if timed_out else "died"
    return f"{names} {what}; rank {rank} noticed {where}. Go on with --resume auto"


def could_not_connect(error: RuntimeError) -> str | None:
    """Return one line if `init_process_group` raised `error` because a process was missing."""
    frames = traceback.extract_tb(error.__traceback__)
    is_connecting = any(frame.name == "init_process_group" for frame in frames)
    if is_connecting and _is_about_processes(error):
        return f"the processes of this launch could not connect ({str(error).splitlines()[0]})"
    return None


def _is_about_processes(error: RuntimeError) -> bool:
    """True if the error is that another process is gone or late, rather than a bug."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS)


def leave(line: str) -> None:
    """End this process and its loader workers at once, with exit code 1.

    Its process group is broken: taking it down in order would wait for the ones that are gone.
    """
    if line:
        say(f"\nerror: {line}")  # a line of its own: the progress bar of rank 0 may stand there
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def _missing(store, ranks: range, may_hang: bool) -> list[int]:
    """The ranks that have died, as far as this machine can tell; else those that stay silent.

    One that waits for a rank that is still there does not notice a third one's death: it is silent
    until the other leaves, and must not be taken for dead.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        silent = [rank for rank in ranks if not store.check([f"left/{rank}"])]
        dead = [rank for rank in silent if _has_died(store, rank)]
        # One that has noticed the loss, too, may have left since: it has said so before it did.
        dead = [rank for rank in dead if not store.check([f"left/{rank}"])]
        if dead and not may_hang:
            return dead
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(0.1)


def _has_died(store, rank: int) -> bool:
    if not store.check([f"process/{rank}"]):
        return False
    host, pid = store.get(f"process/{rank}").decode().split()
    try:
        return host == platform.node() and psutil.Process(int(pid)).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def _place_in_the_training(error: RuntimeError) -> str:
    """The collective's place: the line of a train file, "at `accelerator.backward(loss)`"."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if Path(frame.filename).name in TRAIN_FILES]
    return f"at `{lines[-1]}`" if lines else "in a collective"

"""Interrupt checkpoint saves at many points. Print a JSON report of what each save left behind.

python tests/core/faulty_save.py by_hand|accelerate FOLDER kill/1 ENOSPC/2 EACCES/2 size/2 strace/1

For example, ENOSPC/2 tests this fault at every second point of a save. Each save runs in a child
process, on a copy of a run that has two checkpoints. The parent process has only one thread, so
that it can fork safely.
"""

import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes.signals import StopSignals
from accel_demo.run.checkpoint import Checkpoints
from accel_demo.run.folder import describe_run
from accel_demo.run.log import TrainLog
from accel_demo.run.manifest import Damaged, checkpoints_of, newest_complete, verify
from accel_demo.run.progress import Progress
from accel_demo.run.run import claim_run
from accel_demo.run.state import TrainingState

ENVIRONMENT = describe_run("train_plain", "plain", torch.device("cpu"), "no")
NAMING = r"posix\.(open|mkdir|rename|replace|unlink|rmdir|truncate)|io\.open"
NAMING += r"|safetensors\._safetensors_rust\.serialize_file"
WRITING = r"posix\.(write|fsync|close)|(FileIO|BufferedWriter|TextIOWrapper)\.\w+"
WRITING += r"|torch\._C\.write_\w+"
READING = r"posix\.(stat|lstat|scandir|listdir)|DirEntry\.\w+"
# The calls at which each fault can occur. Killing the process at a read would test nothing new.
CALLS = {
    "kill": re.compile(f"{NAMING}|{WRITING}"),
    "ENOSPC": re.compile(f"{NAMING}|{WRITING}"),
    "EACCES": re.compile(f"{NAMING}|{READING}"),
}
FULL_FROM_NOW = ("write", "writev", "pwrite64", "fsync", "ftruncate")  # a full disk stays full
SYSTEM_CALLS = (*FULL_FROM_NOW, "openat", "close", "mkdir", "rename", "unlink", "unlinkat", "rmdir")
ERRORS = ("error=ENOSPC", "error=EACCES", "signal=SIGKILL")


class Training:
    """A training state that stores the step in its weights, optimizer, scheduler and seed."""

    def __init__(self, method: str, folder: Path):
        self.config = TrainConfig(model="tiny_cnn", dataset="synthetic", run_dir=str(folder))
        self.model = make_model(self.config)
        self.optimizer = make_optimizer(self.config, self.model, "no")
        self.scheduler = make_scheduler(self.config, self.optimizer, 100)
        self.model(torch.zeros(2, 1, 28, 28)).sum().backward()
        self.optimizer.step()  # creates the optimizer's state
        parts = self.model, self.optimizer, self.scheduler
        if method == "accelerate":
            accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
            accelerator.prepare(*parts)
            self.save_state, self.load_state = accelerator.save_state, accelerator.load_state
        else:
            state = TrainingState(*parts, torch.amp.GradScaler("cpu", enabled=False))
            self.save_state, self.load_state = state.save, state.load

    def open(self, resume: str = "") -> Checkpoints:
        config = replace(self.config, resume=resume)
        run = claim_run(config, ENVIRONMENT, StopSignals(1), torch.device("cpu"), 100)
        run.load_checkpoint(self.load_state, self.model, self.scheduler)
        run.begin()
        self.log = TrainLog(run.checkpoints.folder, self.config, 1, 0, {})
        return run.checkpoints

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        next(self.model.parameters()).data.fill_(step)
        self.optimizer.param_groups[0]["weight_decay"] = self.scheduler.last_epoch = step
        torch.manual_seed(step)
        progress = Progress(self.config, 100, epoch=0, batches=step, step=step)
        checkpoints.save(self.save_state, progress, self.log)

    def steps(self) -> list[float]:
        """Return the step that each part of the training state stores."""
        decay = self.optimizer.param_groups[0]["weight_decay"]
        weights = next(self.model.parameters()).unique().tolist()
        return [*weights, decay, self.scheduler.last_epoch, torch.initial_seed()]


def main(method: str, folder: Path, faults: list[str]) -> dict:
    training = Training(method, folder / "run")
    checkpoints = training.open()
    for step in (1, 2):
        training.save(checkpoints, step)
    shutil.copytree(checkpoints.folder, folder / "before")
    report = {"threads": len(os.listdir("/proc/self/task"))}
    for fault, every in (word.split("/") for word in faults):
        report[fault] = []
        for interruption in itertools.islice(
            interruptions(fault, training, checkpoints), 0, None, int(every)
        ):
            shutil.rmtree(checkpoints.folder)
            shutil.copytree(folder / "before", checkpoints.folder)
            point = in_a_child(lambda: save_or_refuse(training, checkpoints), interruption)
            if not point.pop("reached"):
                break
            report[fault].append(point | what_is_left(training))
    return report


def interruptions(fault: str, training: Training, checkpoints: Checkpoints):
    """Return the points at which to interrupt a save, as keyword arguments for `run_child`."""
    if fault == "size":
        files = list(checkpoints_of(checkpoints.folder)[0].iterdir())
        sizes = [path.stat().st_size for path in files]
        limits = {0, 1, *sizes, *(size - 1 for size in sizes), *range(0, max(sizes), 4096)}
        return [{"limit": limit} for limit in sorted(limits)]
    if fault == "strace":
        log = checkpoints.folder.with_name("strace.txt")
        in_a_child(lambda: save_or_refuse(training, checkpoints), {"strace": f"-o{log}"})
        calls = re.findall(r"^(?:\d+ +)?(\w+)\(", log.read_text(), re.MULTILINE)
        return [
            {"strace": f"-einject={name}:{error}:when={number}{'+' * (name in FULL_FROM_NOW)}"}
            for name in sorted(set(calls))
            for number in range(1, calls.count(name) + 1)
            for error in ERRORS
        ]
    return ({"call": number, "fault": fault} for number in itertools.count(1))


def save_or_refuse(training: Training, checkpoints: Checkpoints) -> dict:
    try:
        training.save(checkpoints, 3)
    except UserError as error:
        return {"ended": "refused", "message": str(error)}
    return {"ended": "saved"}


def in_a_child(save, interruption: dict) -> dict:
    """Interrupt `save` in a child process. Return how it ended, and whether the fault occurred."""
    parent_end, child_end = socket.socketpair()
    child = os.fork()
    if child == 0:
        run_child(save, child_end, **interruption)
    child_end.close()
    strace = attach(child, interruption["strace"]) if "strace" in interruption else None
    parent_end.send(b"go")
    result = {"reached": True, **interruption}
    with parent_end, parent_end.makefile() as lines:
        for line in lines:
            result |= json.loads(line)
    _, status = os.waitpid(child, 0)
    if strace:
        strace.communicate(timeout=20)
    if os.WIFSIGNALED(status):
        return result | {"ended": "killed", "signal": os.WTERMSIG(status)}
    assert status == 0, f"the save failed with a traceback: {result}"
    return result


def run_child(save, pipe, call=0, fault="", limit=None, strace=None) -> None:
    """Call `save`, then `os._exit`, so that files inherited from the parent are not flushed."""
    seen = 0

    def send(values: dict) -> None:
        pipe.sendall(json.dumps(values).encode() + b"\n")

    def profile(frame, event, function):
        nonlocal seen
        if event == "c_call" and CALLS[fault].fullmatch(name_of(function)):
            seen += not frame.f_code.co_filename.endswith("linecache.py")
            if seen == call:
                place = {"at": name_of(function), "in": frame.f_code.co_name}
                send(place)
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                number = getattr(errno, fault)
                raise OSError(number, os.strerror(number))

    try:
        pipe.recv(2)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if call:
            sys.setprofile(profile)
        result = save()
        sys.setprofile(None)
        send(result | {"reached": not call or seen >= call})
        os._exit(0)
    except BaseException:
        sys.setprofile(None)
        send({"traceback": traceback.format_exc()})
        os._exit(1)


def attach(child: int, option: str) -> subprocess.Popen:
    command = ["strace", "-p", str(child), f"-etrace={','.join(SYSTEM_CALLS)}", option]
    command += [] if option.startswith("-o") else ["-o/dev/null"]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = strace.stderr.readline()
    assert "attached" in line, line
    return strace


def name_of(function) -> str:
    owner = getattr(function, "__module__", None) or type(function.__self__).__name__
    return f"{owner}.{function.__name__}"


def what_is_left(training: Training) -> dict:
    """Resume, and save again. Return the resumed step, and the checkpoints before and after."""
    folder = Path(training.config.run_dir)
    complete, damaged = [], []
    for path in checkpoints_of(folder):
        try:
            complete.append(verify(path)["step"])
        except Damaged as reason:
            damaged.append(f"{path.name}: {reason}")
    _, remarks = newest_complete(folder)
    checkpoints = training.open(resume="auto")
    resumed, loaded = checkpoints.start.step, training.steps()
    training.save(checkpoints, 4)
    names = sorted(os.listdir(folder / "checkpoints"))
    steps = [verify(folder / "checkpoints" / name)["step"] for name in names if name[0] != "."]
    return {
        "complete": complete,
        "damaged": damaged + remarks,
        "resumed": resumed,
        "loaded": loaded,
        "names": names,
        "steps": steps,
    }


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # only the report may be written to stdout
        report = main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    print(json.dumps(report))

"""Run the learner's script of exercise 91 on one rank, and record what it does.

graders/91.py calls `run` on every rank that torchrun starts. Hooks of PyTorch and Python record
which images each optimizer step uses, which files are written and what is printed. The result
alone decides whether the answer is wrong, and the record explains why.
"""

import os
import re
import runpy
import signal
import sys
import threading
import traceback
import zlib
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import grading
from grading import flatten, is_in_answer, wait_for

LINE = re.compile(r"epoch (\d+): (\d+) of (\d+) test images correct")
INPUTS = 28 * 28  # input features of the network's first layer
GRACE = 3  # seconds that a rank with a mistake waits for the reports of the others


@dataclass
class Record:
    """What one rank has done so far.

    `error` is the error that ended the script, or "". `is_at` is the line that the script had
    reached when the time was up (`is_stuck`) or another rank failed.
    """

    error: str = ""
    is_at: int = 0
    is_stuck: bool = False
    is_killed: bool = False
    lines: list[tuple[int, ...]] = field(default_factory=list)  # (epoch, correct, total) printed
    files: list[str] = field(default_factory=list)  # written, relative to the folder
    batches: list[list[int]] = field(default_factory=list)  # per optimizer step, CRCs of its images
    learning_rates: list[float] = field(default_factory=list)  # all that were used
    connected: int = 0  # processes in the group, at the last optimizer step
    first_weights: float | None = None  # sum of the first layer's weights at the first step
    weights: str = ""  # float32 values of all parameters at the end, in hexadecimal


def run(
    answer: Path, folder: Path, epochs: int, reports: Path, kill_after: int, patience: float
) -> None:
    """Run the script, and write this rank's record to the folder `reports`. Does not return.

    If `kill_after` is not negative, all ranks are killed with SIGKILL when the line of that epoch
    is printed. After `patience` seconds, the script is stopped.
    """
    rank = Rank(reports, kill_after)
    (reports / f"{rank.rank}.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
    record_files(folder, rank.record.files)
    record_weights = record_training(rank.record)
    sys.argv = [str(answer), "--folder", str(folder), "--epochs", str(epochs)]
    sys.path[0] = str(answer.parent)
    output, errors = Watched(sys.stdout, rank.on_line), Watched(sys.stderr, rank.on_error_line)
    sys.stdout, sys.stderr = output, errors  # pyright: ignore (they behave like text streams)
    threading.Thread(target=rank.watch, args=[patience], daemon=True).start()
    try:
        runpy.run_path(str(answer), {grading.ANSWER: True}, "__main__")
        error = None
    except BaseException as raised:
        error = None if isinstance(raised, SystemExit) and not raised.code else raised
    if error:
        rank.fail(error)
    else:
        for thread in threading.enumerate():  # such as one that is still saving
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        record_weights()
        rank.report()
    output.flush()
    errors.flush()
    os._exit(1 if error else 0)  # Python's own exit may wait for the other ranks


class Rank:
    """This rank. If it fails or is stuck, all ranks report, because another may show the cause."""

    def __init__(self, reports: Path, kill_after: int):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.reports, self.kill_after = reports, kill_after
        self.failed = reports / "failed"  # exists as soon as a rank has failed or is stuck
        self.record, self.last_error_line = Record(), ""
        self.lock, self.is_reported = threading.Lock(), False

    def report(self) -> None:
        """Write the record, the first time this is called."""
        with self.lock:
            if not self.is_reported:
                grading.write_report(self.reports, f"{self.size}-{self.rank}", asdict(self.record))
            self.is_reported = True

    def on_line(self, line: str) -> None:
        if match := LINE.fullmatch(line.strip()):
            self.record.lines.append(tuple(map(int, match.groups())))
            if self.record.lines[-1][0] == self.kill_after:
                self.record.is_killed = True
                self.report()
                self.kill_all()

    def on_error_line(self, line: str) -> None:
        self.last_error_line = line.strip() or self.last_error_line

    def watch(self, patience: float) -> None:
        """Report where the script is when the time is up or another rank has failed."""
        wait_for(lambda: self.is_reported or self.failed.exists(), patience)
        if self.failed.exists():
            wait_for(lambda: self.is_reported, GRACE / 3)  # this rank may fail as well
        if self.is_reported:
            return
        self.record.is_stuck = not self.failed.exists()
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        frames = traceback.walk_stack(frame)
        self.record.is_at = next((line for one, line in frames if is_in_answer(one)), 0)
        self.report()
        if self.record.is_stuck:
            self.end_all()
            os._exit(1)

    def fail(self, error: BaseException) -> None:
        # argparse prints its errors and then exits.
        is_exit = isinstance(error, SystemExit) and self.last_error_line
        remark = f", {self.last_error_line}" if is_exit else ""
        self.record.error = grading.describe_error(error, remark)
        self.report()
        self.end_all()

    def end_all(self) -> None:
        """Wait until all ranks have reported. torchrun kills them when this one exits."""
        self.failed.touch()
        wait_for(lambda: len(list(self.reports.glob("*.json"))) == self.size, GRACE)

    def kill_all(self) -> None:
        """Kill all ranks with SIGKILL, this one last. torchrun then ends by itself."""
        for other in range(self.size):
            file = self.reports / f"{other}.pid"
            if other != self.rank:
                wait_for(
                    lambda file=file: (
                        file.exists() and file.read_text(encoding="utf-8").endswith("\n")
                    ),
                    GRACE,
                )
                os.kill(int(file.read_text(encoding="utf-8")), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """A text stream that calls `on_line` with each line that is written."""

    def __init__(self, stream, on_line):
        self.stream, self.on_line, self.rest = stream, on_line, ""

    def write(self, text: str) -> int:
        size = self.stream.write(text)
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.on_line(line)
        return size

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def record_files(folder: Path, files: list[str]) -> None:
    """Add every file in `folder` to `files` when it is written, renamed or linked.

    Audit events cover Python's file operations, but not those of C++ and Rust. So torch.save and
    safetensors are replaced by functions that add the file first.
    """
    import safetensors.torch
    import torch

    root = os.path.realpath(folder)

    def add(path) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.path.relpath(os.path.realpath(os.fsdecode(path)), root)
            if not name.startswith("..") and name not in files:
                files.append(name)

    def on_event(event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            add(arguments[0])
        elif event in ("os.rename", "os.link", "os.symlink"):
            add(arguments[1])

    def adding(function, name: str):
        @wraps(function)
        def add_and_call(*arguments, **options):
            add(options[name] if name in options else arguments[1])
            return function(*arguments, **options)

        return add_and_call

    sys.addaudithook(on_event)
    torch.save = torch.serialization.save = adding(torch.save, "f")
    rust: Any = safetensors.torch
    rust.serialize_file = adding(rust.serialize_file, "filename")


def record_training(record: Record):
    """Record each optimizer step. Return a function that records the weights at the end."""
    import torch
    import torch.distributed as dist
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    images: list[int] = []
    optimizers = []

    def before_forward(module, inputs) -> None:
        is_first_layer = isinstance(module, torch.nn.Linear) and module.in_features == INPUTS
        if not is_first_layer or not torch.is_grad_enabled():
            return
        rows = inputs[0].detach().cpu().reshape(-1, INPUTS).contiguous().numpy()
        images.extend(zlib.crc32(row.tobytes()) for row in rows)
        if record.first_weights is None:
            record.first_weights = module.weight.double().sum().item()

    def after_step(optimizer, *_) -> None:
        optimizers[:] = [optimizer]
        record.batches.append(list(images))
        images.clear()
        for group in optimizer.param_groups:
            if group["lr"] not in record.learning_rates:
                record.learning_rates.append(group["lr"])
        record.connected = dist.get_world_size() if dist.is_initialized() else 1
        if "accelerate" in sys.modules:
            from accelerate import PartialState

            # Without a GPU, each process of a plain `Accelerator()` is not connected to the others.
            if PartialState._shared_state:
                record.connected = PartialState().num_processes

    def finish() -> None:
        if optimizers:
            groups = optimizers[0].param_groups
            weights = flatten(weight for group in groups for weight in group["params"])
            record.weights = weights.float().numpy().tobytes().hex()

    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_post_hook(after_step)
    return finish

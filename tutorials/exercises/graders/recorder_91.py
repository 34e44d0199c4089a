"""Run the learner's script of exercise 91 on one rank, and record what it does.

graders/91.py calls `run` on every rank that torchrun starts. Hooks of PyTorch and Python record
which images each optimizer step uses, which files are written and what is printed. The record says
why a result is wrong. Whether it is wrong, only the result says.
"""

import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import zlib
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from accel_demo.lab import grading

LINE = re.compile(r"epoch (\d+): (\d+) of (\d+) test images correct")
INPUTS = 28 * 28  # input features of the network's first layer
GRACE = 3  # seconds that a rank with a mistake waits for the reports of the others


@dataclass
class Record:
    """What one rank has done until now.

    `error` is the error that ended the script, or "". `is_at` is the script's line at the end, if
    the time was up (`is_stuck`) or another rank failed.
    """

    error: str = ""
    is_at: int = 0
    is_stuck: bool = False
    has_ended: bool = False
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
    is printed. After `patience` seconds, the script is stopped. If a rank fails or is stuck, every
    other rank also writes its record, because it may contain the cause.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    record, last_words = Record(), [""]

    def report() -> None:
        grading.write_report(reports, f"{size}-{rank}", asdict(record))

    def on_line(line: str) -> None:
        if match := LINE.fullmatch(line.strip()):
            record.lines.append(tuple(map(int, match.groups())))
            if record.lines[-1][0] == kill_after:
                record.is_killed = True
                report()
                kill_all(reports, size, rank)

    def on_error_line(line: str) -> None:
        last_words[0] = line.strip() or last_words[0]

    def watch() -> None:
        failed = reports / "failed"
        wait_for(lambda: record.error or record.has_ended or failed.exists(), patience)
        if record.error or record.has_ended:
            return
        is_first = not failed.exists()
        failed.touch()
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        lines = [line for frame, line in traceback.walk_stack(frame) if is_in(frame, answer)]
        record.is_at = lines[0] if lines else 0
        record.is_stuck = is_first
        report()
        if is_first:
            wait_for_all()
            os._exit(1)

    def wait_for_all() -> None:
        wait_for(lambda: len(list(reports.glob("*.json"))) == size, GRACE)

    (reports / f"{rank}.pid").write_text(f"{os.getpid()}\n")
    record_files(folder, record.files)
    finish = record_training(record)
    sys.argv = [str(answer), "--folder", str(folder), "--epochs", str(epochs)]
    sys.path[0] = str(answer.parent)
    output, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Watched(output, on_line), Watched(errors, on_error_line)  # pyright: ignore
    threading.Thread(target=watch, daemon=True).start()
    try:
        runpy.run_path(str(answer), run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            record.error = described(error, answer, last_words[0])
    if not record.error:
        for thread in threading.enumerate():  # such as one that is still saving
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        finish()
        record.has_ended = True
    report()
    if record.error:
        (reports / "failed").touch()
        wait_for_all()
    for stream in (output, errors):
        stream.flush()
    os._exit(1 if record.error else 0)  # Python's own exit may wait for the other ranks


def described(error: BaseException, answer: Path, last_words: str) -> str:
    """Format an error as one line, such as "ValueError: too many values (line 12 of your file)".

    argparse prints its errors and then exits: `last_words` is the last line on stderr.
    """
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, SystemExit) and last_words:
        message += f", {last_words}"
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if is_in(frame, answer)]
    place = f" (line {lines[-1]} of your file)" if lines else ""
    return f"{type(error).__name__}{': ' * bool(message)}{message}{place}"


def is_in(frame, answer: Path) -> bool:
    return frame.f_code.co_filename == str(answer)


def kill_all(reports: Path, size: int, rank: int) -> None:
    """Kill all ranks with SIGKILL, this one last. torchrun then ends by itself."""
    for other in range(size):
        file = reports / f"{other}.pid"
        if other != rank:
            wait_for(lambda file=file: file.exists() and file.read_text().endswith("\n"), GRACE)
            os.kill(int(file.read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


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
    """Add every file in `folder` to `files` when it is written, or when it gets its name.

    Python reports its own operations on files, but not those of C++ and Rust: torch.save and
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

            # Without a GPU, each process of a plain `Accelerator()` believes it is the only one.
            if PartialState._shared_state:
                record.connected = PartialState().num_processes

    def finish() -> None:
        if optimizers:
            groups = optimizers[0].param_groups
            weights = [weight.detach().flatten() for group in groups for weight in group["params"]]
            record.weights = torch.cat(weights).float().cpu().numpy().tobytes().hex()

    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_post_hook(after_step)
    return finish

"""How the reader's command is started: with several processes, the observer, and without GPUs."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.observer import agent
from accel_demo.observer.events import FOLDER
from accel_demo.processes.environment import RANK_VARIABLES

RUN_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
OFFLINE = {  # experiment trackers do not send the results of an audit
    "WANDB_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
}
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "-1"}
MODULE = {"-m", "--module"}
FLAGS = {"torchrun": "--nproc-per-node", "accelerate": "--num_processes"}
PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|num[-_]processes)(=.*)?")


def command_for(words: list[str], processes: int | None) -> list[str]:
    """Return the command to start. A Python script gets `processes` processes from torchrun.

    A launcher of the reader is started as it is. Without `processes`, so is `python script.py`,
    because the script may start its processes itself.
    """
    words = list(words)
    if words[0].endswith(".py"):
        python = "python" if shutil.which("python") else sys.executable
        words, processes = [python, *words], processes or 2
    if processes is None:
        return words
    if not is_python(words[0]) or is_launcher(words):
        raise UserError(
            "--processes needs a Python script. A launcher takes its own flag, such as "
            "--nproc-per-node or --num_processes."
        )
    flags = flags_of_python(words)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a random port
    return [words[0], *flags, *launcher, *words[1 + len(flags) :]]


def single_command(command: list[str], processes: int | None, name: str) -> list[str]:
    """Return the reader's command with one process. `name` is that of the command that runs it.

    Raises `UserError` if it is not the command of a launcher.
    """
    if command[0].endswith(".py") or (is_python(command[0]) and processes is not None):
        return command_for(command, 1)
    flag = FLAGS.get(Path(command[0]).name)
    begin = 1
    if is_python(command[0]) and is_launcher(command):
        is_accelerate = "accelerate.commands.launch" in command
        flag, begin = FLAGS["accelerate" if is_accelerate else "torchrun"], 3
    ends = [n for n, word in enumerate(command) if word.endswith(".py") or word in MODULE]
    place = next((n for n in ends if n >= begin), None)
    if flag is None or place is None:
        raise UserError(
            f"{name} must choose the number of processes: name a script, or a command that starts "
            f"one with torchrun or accelerate launch, got {shlex.join(command)}"
        )
    return [*without_processes(command[:place]), flag, "1", *command[place:]]


def without_processes(words: list[str]) -> list[str]:
    """Return the words of a launcher without the flag for the number of processes."""
    kept: list[str] = []
    is_value = False
    for word in words:
        flag = PROCESSES.fullmatch(word)
        if not flag and not is_value:
            kept.append(word)
        is_value = flag is not None and flag[2] is None
    return kept


def is_python(word: str) -> bool:
    return Path(word).name.startswith("python")


def flags_of_python(words: list[str]) -> list[str]:
    """Return the flags between `python` and its script, module or code, such as -u or -X dev."""
    flags: list[str] = []
    for word in words[1:]:
        if flags[-1:] not in (["-W"], ["-X"]) and (word[:1] != "-" or word in ("-c", "-m")):
            break
        flags.append(word)
    return flags


def is_launcher(words: list[str]) -> bool:
    return any(
        words[n : n + 1] == ["-m"] and words[n + 1] in RUN_MODULES for n in range(len(words) - 1)
    )


def environment_for(folder: Path, gpu: bool, limits: dict[str, str]) -> dict[str, str]:
    """Return the environment of the observed command, with `limits` for the observer."""
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    environment |= limits
    environment = agent.inject(environment, FOLDER, str(folder)) | {"PYTHONUNBUFFERED": "1"}
    for name, value in OFFLINE.items():
        environment.setdefault(name, value)
    if not gpu:
        environment |= HIDDEN
        if has_gpus():  # with them, plain Accelerator() would connect: so let it connect here, too
            environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def has_gpus() -> bool:
    """Return whether this machine has GPUs, without importing torch."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))


def check_program(words: list[str]) -> None:
    """Raise `UserError` if the command's program or script does not exist or ignores PYTHONPATH."""
    if words[0].endswith(".py"):
        flags, rest = [], words
    elif shutil.which(words[0]) is None:
        raise UserError(f"there is no program {words[0]}")
    else:
        flags = flags_of_python(words) if is_python(words[0]) else []
        rest = words[1 + len(flags) :]
    for flag in flags:
        if flag[:2] not in ("--", "-W", "-X") and flag[0] == "-" and set("IES") & set(flag):
            raise UserError(f"python {flag} ignores PYTHONPATH, so the script cannot be observed")
    if rest and rest[0].endswith(".py") and not Path(rest[0]).is_file():
        raise UserError(f"there is no file {rest[0]}")

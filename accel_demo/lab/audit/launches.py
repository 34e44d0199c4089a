"""How the reader's command is started: with several processes, the observer, and without GPUs."""

import os
import shutil
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.observer import agent
from accel_demo.observer.events import FOLDER
from accel_demo.observer.limits import BATCHES, STEPS
from accel_demo.processes.environment import RANK_VARIABLES

RUN_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
OFFLINE = {  # experiment trackers do not send the results of an audit
    "WANDB_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
}
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "-1"}


def command_for(words: list[str], processes: int | None) -> list[str]:
    """Return the command to start. A Python script gets `processes` processes from torchrun.

    A launcher of the reader is started as it is. Without `processes`, so is `python script.py`,
    because the script may start its processes itself.
    """
    words = list(words)
    if words[0].endswith(".py"):
        words, processes = ["python", *words], processes or 2
    if not Path(words[0]).name.startswith("python") or is_launcher(words) or processes is None:
        if processes is not None:
            raise UserError(
                "--processes needs a Python script. A launcher takes its own flag, such as "
                "--nproc-per-node or --num_processes."
            )
        return words
    own = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    # A random port: several audits may run at once.
    return [words[0], *own, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words[1:]]


def is_launcher(words: list[str]) -> bool:
    return any(
        words[n : n + 1] == ["-m"] and words[n + 1] in RUN_MODULES for n in range(len(words) - 1)
    )


def environment_for(folder: Path, options) -> dict[str, str]:
    """Return the environment of the audited command. `options` are those of `accel-demo audit`."""
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    environment |= {BATCHES: str(options.batches), STEPS: str(options.steps)}
    environment = agent.inject(environment, FOLDER, str(folder)) | {"PYTHONUNBUFFERED": "1"}
    for name, value in OFFLINE.items():
        environment.setdefault(name, value)
    if not options.gpu:
        environment |= HIDDEN
        if has_gpus():  # with them, plain Accelerator() would connect: so let it connect here, too
            environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def has_gpus() -> bool:
    """Return whether this machine has GPUs, without importing torch."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))


def check_program(words: list[str]) -> None:
    """Raise `UserError` if the command's program or Python file does not exist or ignores us."""
    if words[0].endswith(".py"):
        words = ["python", *words]
    if shutil.which(words[0]) is None:
        raise UserError(f"there is no program {words[0]}")
    for word in words[1:]:
        if word.endswith(".py") and not Path(word).is_file():
            raise UserError(f"there is no file {word}")
        if not word.startswith("-") or word in ("-c", "-m"):
            break
        is_flag_of_python = Path(words[0]).name.startswith("python") and word[1] != "-"
        if is_flag_of_python and set("IES") & set(word):
            raise UserError(f"python {word} ignores PYTHONPATH, so the script cannot be observed")

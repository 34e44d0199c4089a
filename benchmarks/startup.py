"""Measure how long a command takes until its first training step, and how long its imports take.

python benchmarks/startup.py

The commands train on 256 packaged images on the CPU. The clock starts with the command, and stops
when the train file writes environment.json just before its first step. For `accel-demo --help`, the
clock stops when the command exits. Each import is timed in a new Python process. Under a launcher,
torch is imported twice: by the launcher and by the training process. Creating the first optimizer
imports torch._dynamo.
"""

import time
from argparse import Namespace
from functools import partial

from measuring import CPU_LAUNCH, in_turns, main, run_command, train

from accel_demo.lab.measurements import Report, Table

REPEATS = 5
SHORT = "--max-steps 1 --train-samples 256 --test-samples 256 --batch-size 64"
TORCHRUN = "torchrun --standalone --nproc-per-node 1"
TWO_CPUS = "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml"
PLAIN = "train_plain.py"
COMMANDS = {  # {table row: (processes, command)}
    PLAIN: (1, "python accel_demo/train_plain.py"),
    "torchrun, train_ddp.py, 1 process": (1, f"{TORCHRUN} accel_demo/train_ddp.py"),
    "train_ddp.py --nproc 2, 2 processes": (2, "python accel_demo/train_ddp.py --nproc 2"),
    "accelerate launch, train.py, 1 process": (1, f"{CPU_LAUNCH} accel_demo/train.py"),
    "accelerate launch, train.py, 2 processes": (2, f"{TWO_CPUS} accel_demo/train.py"),
}
READY = "import torch, accel_demo.train; from accel_demo import config, optimizer; "
READY += "model, choices = torch.nn.Linear(1, 1), config.TrainConfig()"
IMPORTS = {  # {table row: (statements before the clock starts, timed statement)}
    "torch": ("", "import torch"),
    "accelerate, after torch": ("import torch", "import accelerate"),
    "accel_demo, after both": ("import torch, accelerate", "import accel_demo.train"),
    "all that train.py imports": ("", "import accel_demo.train"),
    "the first optimizer of train.py": (READY, "optimizer.make_optimizer(choices, model, 'no')"),
    "all that accelerate launch imports": ("", "import accelerate.commands.launch"),
    "all that torchrun imports": ("", "import torch.distributed.run"),
}


def measure(options: Namespace) -> Report:
    sides = {name: partial(first_step, *COMMANDS[name]) for name in COMMANDS}
    starts = in_turns({**sides, "accel-demo --help": help_seconds}, options.repeats, "starting")
    sides = {name: partial(import_seconds, *IMPORTS[name]) for name in IMPORTS}
    imports = in_turns(sides, options.repeats, "importing")
    commands = Table("From the command to the first step", "s", starts, PLAIN, digits=2)
    return Report([commands, Table("Imports of a fresh Python", "s", imports, digits=2)], [])


def first_step(processes: int, command: str, _: int) -> float:
    return train([*command.split(), *SHORT.split()], processes).first_step_seconds


def help_seconds(_: int) -> float:
    started_at = time.perf_counter()
    run_command(["accel-demo", "--help"])
    return time.perf_counter() - started_at


def import_seconds(before: str, statement: str, _: int) -> float:
    """Run `before` and `statement` in a new Python process. Return the seconds of `statement`."""
    code = f"import time\n{before}\nstarted_at = time.perf_counter()\n{statement}\n"
    return float(run_command(["python", "-c", f"{code}print(time.perf_counter() - started_at)"]))


if __name__ == "__main__":
    main()

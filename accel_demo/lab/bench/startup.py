"""Measure how long a command takes until its first training step, and how long its imports take.

accel-demo bench startup
accel-demo bench startup --repeats 3 --json startup.json

The commands train on 256 packaged images on the CPU. Their runs alternate. The clock starts with
the command, and stops when the train file writes environment.json just before its first step. For
`accel-demo --help`, the clock stops when the command exits. Each import is timed in a new Python
process. Under a launcher, torch is imported twice: by the launcher and by the training process.
Creating the first optimizer imports torch._dynamo.
"""

import json
import statistics
from argparse import Namespace

from tqdm import tqdm

from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.timed_command import accelerate_launch, run_timed, time_training

REPEATS = 5
TIME_LIMIT = 120  # seconds per command
SHORT = "--max-steps 1 --train-samples 256 --test-samples 256 --batch-size 64".split()
PLAIN, HELP = "train_plain.py", "accel-demo --help"
ONE, TWO = "accelerate launch, train.py, 1 process", "accelerate launch, train.py, 2 processes"
DDP, SPAWNED = "torchrun, train_ddp.py, 1 process", "train_ddp.py --nproc 2, 2 processes"
LAUNCHER, ALL = "all that accelerate launch imports", "all that train.py imports"
OPTIMIZER = "the first optimizer of train.py"
LIBRARIES = "import torch, accelerate"
READY = "import torch, accel_demo.train; from accel_demo import config, optimizer; "
READY += "model, choices = torch.nn.Linear(1, 1), config.TrainConfig()"
IMPORTS = {  # {table row: (statements before the clock starts, timed statement)}
    "torch": ("", "import torch"),
    "accelerate, after torch": ("import torch", "import accelerate"),
    "accel_demo, after both": (LIBRARIES, "import accel_demo.train"),
    ALL: ("", "import accel_demo.train"),
    OPTIMIZER: (READY, "optimizer.make_optimizer(choices, model, 'no')"),
    LAUNCHER: ("", "import accelerate.commands.launch"),
    "all that torchrun imports": ("", "import torch.distributed.run"),
}


def measure(options: Namespace) -> Report:
    commands = {
        PLAIN: ["python", "accel_demo/train_plain.py"],
        DDP: ["torchrun", "--standalone", "--nproc-per-node", "1", "accel_demo/train_ddp.py"],
        SPAWNED: ["python", "accel_demo/train_ddp.py", "--nproc", "2"],
        ONE: [*accelerate_launch("cpu.yaml"), "accel_demo/train.py"],
        TWO: [*accelerate_launch("cpu_two_processes.yaml"), "accel_demo/train.py"],
    }
    starts: dict[str, list[float]] = {name: [] for name in (*commands, HELP)}
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    total = options.repeats * (len(starts) + len(imports))
    with tqdm(total=total, desc="starting", unit="command", leave=False) as bar:
        for _ in range(options.repeats):
            for name, command in commands.items():
                processes = 2 if name in (TWO, SPAWNED) else 1
                run = time_training([*command, *SHORT], processes, time_limit=TIME_LIMIT)
                starts[name].append(run.first_step_seconds)
                bar.update()
            starts[HELP].append(run_timed(["accel-demo", "--help"], time_limit=TIME_LIMIT).seconds)
            bar.update()
            for name, (before, statement) in IMPORTS.items():
                imports[name].append(seconds_of(before, statement))
                bar.update()
    commands_table = Table("From the command to the first step", "s", starts, PLAIN, digits=2)
    imports_table = Table("Imports of a fresh Python", "s", imports, digits=2)
    pairs = zip(starts[ONE], starts[PLAIN], strict=True)
    later = statistics.median(launched - plain for launched, plain in pairs)
    rows = (starts[ONE], imports[LAUNCHER], imports[ALL], imports[OPTIMIZER])
    whole, *parts = (statistics.median(row) for row in rows)
    findings = [
        f"With `accelerate launch` the first step comes {later:.1f} s later than in {PLAIN}.",
        f"Imports are {sum(parts):.1f} s of its {whole:.1f} s: {parts[0]:.1f} s in the launcher, "
        f"{parts[1]:.1f} s in train.py, {parts[2]:.1f} s for the first optimizer.",
    ]
    facts: dict[str, float | str] = {"import_seconds": sum(parts)}
    facts["accelerate_launch_later_seconds"] = later
    return Report([commands_table, imports_table], findings, facts)


def seconds_of(before: str, statement: str) -> float:
    """Run `before` and `statement` in a new Python process. Return the seconds of `statement`."""
    code = f"import time\n{before}\nstarted_at = time.perf_counter()\n{statement}\n"
    code += "print(time.perf_counter() - started_at)"
    return json.loads(run_timed(["python", "-c", code], time_limit=TIME_LIMIT).printed_lines[-1])

"""Kill a training run repeatedly and check that this does not change the final weights.

accel-demo crash
accel-demo crash --processes 2 --kills 20 --seed 7

The first run trains without interruption. The second run has the same settings, but one of its
ranks is killed with SIGKILL at a random moment during a step, a save or start-up. After each kill,
the run is launched again with `--resume auto`. The last launch trains to the end. The exit code
is 1 if the weights or metrics of the two runs differ, or if a launch did not resume from the newest
complete checkpoint.
"""

import math
import random
import sys
import tempfile
import time
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab.course.launch_files import launch_config, train_file
from accel_demo.lab.crash import tables
from accel_demo.lab.crash.result import CrashResult, Kill, LaunchResult, compare
from accel_demo.lab.output import write_outputs
from accel_demo.options import Parser, command_parser
from accel_demo.processes.cleanup import sigterm_raises
from accel_demo.terminal import display

KILLS, QUICK_KILLS = 5, 1
STEPS_PER_EPOCH = 15
STEPS_PER_KILL = 5
LAST_STEPS = 9  # no kill is planned in these steps, so that a save follows every kill
BATCH_SIZE = 16
PHASES = ("save", "step", "start-up", "save", "step")  # in which to kill; repeated and shuffled
TRAINING = (
    f"--batch-size {BATCH_SIZE} --accumulate 2 --dropout 0.2 --augment --num-workers 1 "
    "--test-samples 200 --eval-batch-size 100 --log-every 1 --checkpoint-every 3"
).split()


def main(arguments: list[str]) -> int:
    """Run the check and print its result. Return 0 if the check passed."""
    options = make_parser().parse_args(arguments)
    if options.script == "train" and options.processes > 2:
        raise UserError(
            f"accelerate_configs/ has no file for {options.processes} processes on the CPU. "
            "Choose --processes 1 or 2, or --script train_ddp."
        )
    command = launch_command(options.script, options.processes)

    try:
        with (
            sigterm_raises(KeyboardInterrupt),
            tempfile.TemporaryDirectory(prefix="accel-demo-crash-") as folder,
        ):
            result = crash(command, options, Path(folder))
    except KeyboardInterrupt:
        print("\ninterrupted: all processes were stopped", file=sys.stderr)
        return 130
    display(tables.summary(result))
    write_outputs(options, "crash", result, tables.draw)
    return 0 if result.passed else 1


def make_parser() -> Parser:
    parser = command_parser("crash", __doc__, quick=f"{QUICK_KILLS} kill instead of {KILLS}")
    parser.add_processes(1, "number of processes that train")
    parser.add_option("--kills", KILLS, "number of kills", quick=QUICK_KILLS, least=1)
    help = "random seed that determines when and which ranks are killed"
    parser.add_option("--seed", 0, help)
    help = "train file to run: train (Accelerate) or train_ddp (raw DDP)"
    parser.add_option("--script", "train", help, choices=("train", "train_ddp"))
    return parser


def launch_command(script: str, processes: int) -> list[str]:
    """Return the command that launches the course's train file, or the package's outside one."""
    config = launch_config("cpu" if processes == 1 else "cpu_two_processes")
    command = ["accelerate", "launch", "--config_file", config]
    if script == "train_ddp":
        command = ["torchrun", "--standalone", "--nproc-per-node", str(processes)]
    return [*command, train_file(script)]


def plan(kills: int, processes: int, seed: int, total_steps: int) -> list[Kill]:
    """Plan random kills that are spread over the run. The same seed gives the same kills."""
    draw = random.Random(seed)
    phases = draw.sample((PHASES * kills)[:kills], kills)
    steps_per_kill = (total_steps - LAST_STEPS) / (kills - phases.count("start-up"))
    planned, first_step = [], 0.0
    for phase in phases:
        step = int(first_step + draw.random() * steps_per_kill)
        planned.append(Kill(phase, draw.randrange(processes), step, draw.random()))
        if phase != "start-up":  # a launch that is killed during start-up makes no progress
            first_step += steps_per_kill
    return planned


def crash(command: list[str], options, folder: Path) -> CrashResult:
    """Train an uninterrupted run and a killed run in `folder`, and compare them."""
    from accel_demo.lab.crash.launches import Launch  # slow: imports torch

    epochs = math.ceil((STEPS_PER_KILL * options.kills + LAST_STEPS) / STEPS_PER_EPOCH)
    total_steps = epochs * STEPS_PER_EPOCH
    # An odd number of micro-batches, so that the last step of an epoch accumulates only one.
    samples = (2 * STEPS_PER_EPOCH - 1) * BATCH_SIZE * options.processes
    command = [*command, *TRAINING, "--epochs", str(epochs), "--train-samples", str(samples)]
    display(f"{' '.join(command)}\n{total_steps} steps; training the uninterrupted run …")
    with Launch(command, folder / "uninterrupted", options.processes) as uninterrupted:
        usual_seconds = uninterrupted.measure_phases()
    display(f"trained in {uninterrupted.seconds():.0f} s")
    kills = plan(options.kills, options.processes, options.seed, total_steps)
    launches: list[LaunchResult] = []
    first_start = time.monotonic()
    for number, kill in enumerate([*kills, None], start=1):
        with Launch([*command, "--resume", "auto"], folder / "killed", options.processes) as launch:
            if kill:
                launch.kill(kill, usual_seconds)
            else:
                launch.wait()
        if launch.points:
            start_up = launch.points[0][0] - launch.ranks_seen_at
            usual_seconds["start-up"] = min(usual_seconds["start-up"], start_up)
        launches.append(launch.result(launches, first_start))
        display(tables.sentence(number, launches[-1]))
    return CrashResult(
        script=options.script,
        processes=options.processes,
        seed=options.seed,
        steps=total_steps,
        usual_seconds=usual_seconds,
        uninterrupted_points=uninterrupted.points,
        launches=launches,
        comparison=compare(folder / "uninterrupted", folder / "killed"),
    )

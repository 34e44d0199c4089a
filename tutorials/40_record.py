"""Record the measured outputs and pictures of the pages again.

python tutorials/40_record.py           # everything; takes minutes, and needs an idle machine
python tutorials/40_record.py scaling   # or alpha_beta (page 20), dp_or_ddp (25), lost,
                                        # bench/precision (33), signals (35), data_memory
                                        # (36), pays_off (37),
                                        # timeline, profile, buckets (40), speedup, slower, spin
                                        # (41), fits (42), send_less (46); as root on Linux:
                                        # two_machines, two_worlds, rates (44), lost_machine (45),
                                        # send_less_rates (46), slurm_tasks (47);
                                        # with Slurm: launches, preempt (47)
python tutorials/40_record.py --quick   # a preview only: the tests need the full results

If other programs use the processor, it stops, and does not change the transcript. If a page
compares two timelines, they are measured in turn, several times each, and of each, the run with the
median step time is kept.
"""

import json
import os
import random
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab.load import LoadWatch
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end
from accel_demo.show import table

REPOSITORY = Path(__file__).resolve().parent.parent
TIME_LIMIT = 1800  # seconds per command
RUNS = 5  # of each of the commands that are measured in turn
ATTEMPTS = 3
PAUSE, MOST_CORES = 3.0, 0.2  # before each command, other programs may use so much for so long
LONGEST = 60.0  # seconds to wait for that
FITS = "accel-demo memory --devices 8 -- torchrun --nproc-per-node 2 tutorials/42_train.py"
PROFILED = "accel-demo timeline -- torchrun --standalone --nproc-per-node 2 tutorials/40_train.py"
RECORDS = {
    "alpha_beta": ["python tutorials/alpha_beta.py --plot tutorials/20_alpha_beta.svg"],
    "dp_or_ddp": ["accel-demo bench dataparallel --forward --repeats 25"],
    "lost": ["python tutorials/33_lost.py"],
    "bench/precision": ["accel-demo bench precision"],
    "signals": ["python tutorials/35_signals.py"],
    "data_memory": ["python tutorials/36_memory.py"],
    "pays_off": ["python tutorials/37_pays_off.py"],
    "timeline": [
        "accel-demo timeline --plot tutorials/40_timeline.svg",
        "accel-demo timeline --straggler 1:100ms --plot tutorials/40_straggler.svg",
    ],
    "profile": [
        PROFILED,
        "torchrun --standalone --nproc-per-node 2 tutorials/40_profile.py",
        "python tutorials/40_compare.py runs/profile",
        f"{PROFILED} --workers",
    ],
    "buckets": ["accel-demo timeline --bucket-mb 0.5,2,8,25,100"],
    "fits": [FITS, f"{FITS} --checkpointing"],
    "scaling": ["accel-demo scaling --repeats 25 --plot tutorials/41_scaling.svg"],
    "speedup": ["accel-demo scaling -- torchrun --nproc-per-node 2 tutorials/42_train.py"],
    "slower": ["python tutorials/41_slower.py"],
    "spin": ["python tutorials/41_spin.py"],
    "two_machines": ["accel-demo nodes -- torchrun tutorials/44_two_machines.py"],
    "two_worlds": ["accel-demo nodes --processes-per-node 1 -- python tutorials/44_two_worlds.py"],
    "rates": ["python tutorials/44_rates.py"],
    "send_less": [
        "torchrun --standalone --nproc-per-node 2 tutorials/46_loss.py "
        "--plot tutorials/46_send_less.svg"
    ],
    "send_less_rates": ["python tutorials/46_rates.py"],
    "slurm_tasks": ["accel-demo nodes --slurm-variables -- python tutorials/47_tasks.py"],
    "launches": ["python tutorials/47_launches.py"],
    "preempt": ["python tutorials/47_preempt.py"],
    "lost_machine": ["python tutorials/45_lost_machine.py --plot tutorials/45_lost_machine.svg"],
}
UNDER_SLURM = ["launches", "preempt"]
IN_TURN = {name: [RECORDS[name][0], RECORDS[name][-1]] for name in ("timeline", "profile")}


def run(command: str, folder: Path = REPOSITORY) -> str:
    """Return what a command prints on an idle machine.

    If the machine was busy meanwhile, the output is thrown away, and the command runs again. Raises
    `UserError` if the command fails, or if the machine does not become idle.
    """
    for _ in range(ATTEMPTS):
        wait_until_idle()
        print(command, flush=True)
        result = run_to_end(command, TIME_LIMIT, cwd=folder)
        if result.returncode != 0:
            raise UserError(f"`{command}` returned {result.returncode}: {result.stderr}")
        if not (warning := re.search("busy machine: [^*;]*", result.stdout)):
            return result.stdout.rstrip()
        print(f"thrown away: {warning[0]}")
    raise UserError(f"not recorded: the machine was busy in {ATTEMPTS} runs of `{command}`")


def wait_until_idle() -> None:
    """Raise `UserError` if other programs use the processor for `LONGEST` seconds."""
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        watch = LoadWatch()
        time.sleep(PAUSE)
        load = watch.load()
        if load.others + load.stolen <= MOST_CORES:
            return
    raise UserError(f"not recorded: other programs use {load.others + load.stolen:.1f} cores")


def run_in_turn(name: str, commands: list[str]) -> dict[str, str]:
    """Run `accel-demo timeline` commands several times, in a random order in each round.

    Returns what each printed in the run with the median step time, and writes the step times of
    all runs to transcripts/{name}_runs.txt.
    """
    outputs = {command: {} for command in commands}  # {command: {step time: (output, folder)}}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(RUNS):
            for command in random.sample(commands, len(commands)):
                folder = Path(temporary, f"{number}-{commands.index(command)}")
                Path(folder, "tutorials").mkdir(parents=True)
                shutil.copy(REPOSITORY / "tutorials/40_train.py", folder / "tutorials")
                timeline = "accel-demo timeline"
                output = run(command.replace(timeline, f"{timeline} --json result.json"), folder)
                ranks = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))["ranks"]
                steps = [each["end_ms"] - each["start_ms"] for each in ranks[0]["steps"]]
                step = statistics.median(steps)
                outputs[command][step] = output.replace(", result.json", ""), folder
        rows, kept = [], {}
        for command, runs in outputs.items():
            middle = statistics.median_low(runs)
            kept[command], folder = runs[middle]
            for picture in Path(folder, "tutorials").glob("*.svg"):
                shutil.copy(picture, REPOSITORY / "tutorials")
            times = ", ".join(f"{step:.0f}" for step in sorted(runs))
            command = command.split(" --plot")[0].split("tutorials/")[-1]
            rows.append([f"`{command}`", times, f"{middle:.1f}"])
    head = ["command", f"ms per step in {RUNS} runs", "median"]
    write(f"{name}_runs", table(head, rows) + "\n")
    return kept


def run_under_slurm(commands: list[str]) -> dict[str, str]:
    """Run commands in a new written course with a Slurm cluster of its own."""
    local_slurm = f"python {REPOSITORY / 'tutorials/cluster/slurm/local_slurm.py'}"
    with tempfile.TemporaryDirectory() as temporary:
        course, cluster = Path(temporary, "course"), f"--folder {temporary}/cluster --port 18917"
        run(f"accel-demo init {course}")
        printed = run(f"{local_slurm} up {cluster}")
        os.environ["SLURM_CONF"] = printed.removeprefix("export SLURM_CONF=")
        try:
            return {command: run(command, course) for command in commands}
        finally:
            run(f"{local_slurm} down {cluster}")


def record(name: str, option: str = "") -> None:
    """Run one transcript's commands, and write the commands and their output to transcripts/."""
    commands = [command + option for command in RECORDS[name]]
    in_turn = [each + option for each in IN_TURN.get(name, [])]
    outputs = run_in_turn(name, in_turn) if in_turn else {}
    if name in UNDER_SLURM:
        outputs = run_under_slurm(commands)
    parts = [f"$ {each}\n{outputs[each] if each in outputs else run(each)}\n" for each in commands]
    write(name, "\n".join(parts))


def write(name: str, text: str) -> None:
    Path(REPOSITORY, "tutorials", "transcripts", f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECORDS)}")
        parser.add_argument("--quick", action="store_true", help="add --quick to each command")
        options = parser.parse_args()
        if unknown := set(options.names) - set(RECORDS):
            parser.error(f"no such transcript: {', '.join(unknown)}")
        for name in options.names or RECORDS:
            record(name, " --quick" if options.quick else "")

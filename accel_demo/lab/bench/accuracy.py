"""Measure the seconds to 90 % and to 92 % test accuracy, against a conventional training.

accel-demo bench accuracy --data-dir /usr/share/datasets/fashion-mnist
accel-demo bench accuracy --data-dir data --repeats 1 --json accuracy.json

The 60,000 training images of Fashion-MNIST, on the CPU, one process. Ours is train.py started by
`accelerate launch`, with only its length chosen. The baseline is the MNIST example of
PyTorch (accel_demo/lab/bench/baseline.py). Repeat i is seed i: ours to 90 %, ours to 92 %, the
baseline to both, in turns and with the same number of threads.

The clock starts with the command, or with the first step; it stops when the line of the first
evaluation at or above the target is printed (the last one of a seed may be 0.3 points below it).
The baseline's images are unpacked before its clock starts, ours are read as they lie. All of it
takes half an hour on two cores.
"""

import json
import os
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab import machine
from accel_demo.lab.bench import baseline
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.timed_command import Timed, accelerate_launch, run_timed

REPEATS = 3
# The length of our run to each target. The one-cycle schedule ends where the run ends, and only
# then is the learning rate low enough for the best accuracy: a run is as long as its target needs.
LENGTH = {0.90: ["--epochs", 1, "--max-steps", 375], 0.92: ["--epochs", 3]}
MARGIN = 0.003  # a seed may end this much below a target that the mean of the seeds reaches
OURS, BASELINE = "accel-demo", "conventional baseline"
EVALUATION = re.compile(r"epoch .* accuracy (\d\.\d+)$")  # a line that either side prints


@dataclass(frozen=True)
class TimedTraining:
    """When it took its first step, and its evaluations: (seconds, accuracy), one per epoch.

    All seconds are since the command was started.
    """

    first_step: float
    evaluations: list[tuple[float, float]]
    threads: int

    @property
    def accuracy(self) -> float:
        """At its end."""
        return self.evaluations[-1][1]


def add_options(parser) -> None:
    help = "folder of Fashion-MNIST (default: data)"
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="FOLDER", help=help)
    help = "use the first N training images, for a quick look; 0 means all (default: 0)"
    parser.add_argument("--train-samples", type=int, default=0, metavar="N", help=help)
    help = f"the baseline stops after N epochs at the latest (default: {baseline.EPOCHS})"
    parser.add_argument(
        "--epochs-baseline", type=int, default=baseline.EPOCHS, metavar="N", help=help
    )


def measure(options) -> Report:
    """Train everything in turns, once per seed, and compare."""
    samples, epochs = options.train_samples, options.epochs_baseline
    if epochs < 1:
        raise UserError(f"--epochs-baseline must be at least 1, got {epochs}")
    images = baseline.idx_folder(options.data_dir.resolve())
    config = TrainConfig("fashion-mnist", data_dir=str(images), train_samples=samples)
    load_datasets(config, world_size=1)  # reports a mistake before anything is started
    precision = "bf16" if machine.has_bf16_instructions() else "no"
    launch = accelerate_launch("cpu.yaml", "--mixed_precision", precision)

    ours: dict[float, list[TimedTraining]] = {target: [] for target in LENGTH}
    theirs: list[TimedTraining] = []
    total = options.repeats * (len(LENGTH) + 1)
    bar = tqdm(total=total, desc="training", unit="run", leave=False)
    with bar, baseline.torchvision_folder(options.data_dir.resolve()) as unpacked:
        for seed in range(options.repeats):
            flags = ["--seed", seed, "--train-samples", samples]
            for target, length in LENGTH.items():
                bar.write(f"seed {seed}: {OURS} to {percent(target)}", sys.stderr)
                own = ["--dataset", "fashion-mnist", "--data-dir", images, *length]
                ours[target].append(run_ours([*launch, "accel_demo/train.py", *own, *flags]))
                bar.update()
            bar.write(f"seed {seed}: {BASELINE}", sys.stderr)
            own = ["--data-dir", unpacked, "--epochs", epochs, "--targets", *LENGTH]
            theirs.append(run_baseline([*own, *flags]))
            bar.update()

    report = compare(ours, theirs)
    report.findings.append(
        f"One process on each side, OMP_NUM_THREADS={report.facts['threads']}; mixed_precision is "
        f"{precision} in {OURS}, the {BASELINE} is fp32."
    )
    if samples:
        report.findings.append(f"Only a quick look: the first {samples:,} training images.")
    report.facts |= {"mixed_precision": precision, "train_samples": samples}
    return report


def run_ours(command: list) -> TimedTraining:
    """The command as a user types it, in a run folder that is thrown away."""
    with tempfile.TemporaryDirectory() as run_dir:
        timed = run_timed([*command, "--run-dir", run_dir], show, **threads())
        environment = json.loads(Path(run_dir, "environment.json").read_text())
    return read_run(timed, "1 process on cpu ", environment["threads_per_process"])


def run_baseline(flags: list) -> TimedTraining:
    command = ["python", "-m", "accel_demo.lab.bench.baseline", *flags]
    timed = run_timed(command, show, **threads())
    return read_run(timed, "first step", int(timed.lines[0][1].split()[-1]))


def read_run(timed: Timed, first_line: str, threads: int) -> TimedTraining:
    """The run that printed these lines; `first_line` is how the first of them must begin."""
    matches = [(seconds, EVALUATION.match(line)) for seconds, line in timed.lines]
    evaluations = [(seconds, float(found[1])) for seconds, found in matches if found]
    return TimedTraining(timed.first_step(first_line), evaluations, threads)


def compare(ours: dict[float, list[TimedTraining]], theirs: list[TimedTraining]) -> Report:
    """The tables of each target, and what they say. `ours` has the runs of each target."""
    first_steps = {BASELINE: theirs, OURS: next(iter(ours.values()))}
    first_steps = {name: [run.first_step for run in runs] for name, runs in first_steps.items()}
    tables = [Table("From process start to the first step", "s", first_steps)]
    findings, times_faster = [], {}
    for target, runs in ours.items():
        found = tables_to(target, runs, theirs)
        tables += found
        if all(len(table.rows) == 2 for table in found) and found:
            whole, steps = (statistics.median(table.ratios(BASELINE)) for table in found)
            means = [ratio_of_means(table) for table in found]
            times_faster[percent(target)] = {"process start": whole, "first step": steps}
            findings.append(
                f"To {percent(target)}: {whole:.3g} x faster from process start and {steps:.3g} x "
                f"from the first step (medians); {means[0]:.3g} x and {means[1]:.3g} x by means."
            )
        findings.append(verdict(target, runs))
    for seed, run in enumerate(theirs):
        accuracies = ", ".join(f"{accuracy:.4f}" for _, accuracy in run.evaluations)
        missed = [percent(t) for t in ours if time_to(t, run.evaluations) is None]
        short = f": it does not reach {' and '.join(missed)}" if missed else ""
        findings.append(f"{BASELINE}, seed {seed}, epoch by epoch: {accuracies}{short}.")
    threads = {run.threads for run in [*theirs, *(run for runs in ours.values() for run in runs)]}
    if len(threads) > 1:
        raise RuntimeError(f"the two sides did not compute in as many threads: {threads}")
    facts = {
        "seeds": list(range(len(theirs))),
        "threads": threads.pop(),
        "times_faster": times_faster,
        "length": {percent(target): LENGTH[target] for target in ours},
        "accuracies": {percent(t): [run.accuracy for run in runs] for t, runs in ours.items()},
        "mean_accuracy": {
            percent(t): statistics.mean(run.accuracy for run in runs) for t, runs in ours.items()
        },
        "baseline_accuracies": [[each for _, each in run.evaluations] for run in theirs],
    }
    return Report("accuracy", tables, findings, facts)


def ratio_of_means(table: Table) -> float:
    """How many times as long the baseline takes, in the mean of the seeds."""
    return statistics.mean(table.rows[BASELINE]) / statistics.mean(table.rows[OURS])


def tables_to(target: float, ours: list[TimedTraining], theirs: list[TimedTraining]) -> list[Table]:
    """Seconds to the target from process start and from the first step.

    A side that misses the target has no row, and with both sides missing it there is no table.
    """
    times = {}
    if all(time_to(target, run.evaluations) is not None for run in theirs):
        times[BASELINE] = [(time_to(target, run.evaluations), run.first_step) for run in theirs]
    if is_reached(target, ours):
        times[OURS] = [(time_to(target, run.evaluations), run.first_step) for run in ours]
    whole = {name: [at for at, _ in pairs] for name, pairs in times.items()}
    steps = {name: [at - first for at, first in pairs] for name, pairs in times.items()}
    title, reference = f"To {percent(target)} test accuracy", OURS if len(times) == 2 else None
    tables = [
        Table(f"{title}, from process start", "s", whole, reference),
        Table(f"{title}, from the first step", "s", steps, reference),
    ]
    return tables if times else []


def time_to(target: float, evaluations: list[tuple], margin: float = MARGIN) -> float | None:
    """Seconds at the first evaluation at or above `target`; None where there is none.

    The last one also counts where it is at most `margin` below.
    """
    for seconds, accuracy in evaluations:
        if accuracy >= target:
            return seconds
    seconds, accuracy = evaluations[-1]
    return seconds if is_within(margin, accuracy, target) else None


def is_reached(target: float, runs: list[TimedTraining]) -> bool:
    """Whether the mean of the seeds is at or above the target, and none is too far below."""
    accuracies = [run.accuracy for run in runs]
    enough = is_within(0.0, statistics.mean(accuracies), target)
    return enough and all(is_within(MARGIN, accuracy, target) for accuracy in accuracies)


def is_within(margin: float, accuracy: float, target: float) -> bool:
    return accuracy >= target - margin - 1e-9  # 0.92 - 0.003 is a little above 0.917 in floats


def verdict(target: float, runs: list[TimedTraining]) -> str:
    """Our accuracies seed by seed, and whether they are enough."""
    accuracies, length = [run.accuracy for run in runs], " ".join(map(str, LENGTH[target]))
    ends = "reaches it" if is_reached(target, runs) else "MISSES IT"
    return (
        f"{OURS} to {percent(target)} ({length}), seed by seed: "
        f"{', '.join(f'{accuracy:.4f}' for accuracy in accuracies)}. Mean "
        f"{statistics.mean(accuracies):.4f}, lowest {min(accuracies):.4f}: {ends} (the mean must "
        f"be {target:.4f}, and each seed {target - MARGIN:.4f})."
    )


def threads() -> dict[str, Any]:
    """As many as the user says, else one per core: each way to start has its own idea of it."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(machine.usable_cores())}


def show(line: str) -> None:
    tqdm.write(f"  {line}", sys.stderr)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"

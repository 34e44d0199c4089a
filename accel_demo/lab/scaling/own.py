"""Measure how much faster the reader's script is in several processes than in one."""

import copy
import random
import shlex
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from accel_demo.anatomy.devices import usable_cores
from accel_demo.errors import UserError, say
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.launches import single_command
from accel_demo.lab.observed.observation import (
    check_complete,
    observe,
    processes_in_words,
    too_few_steps,
)
from accel_demo.lab.output import MeasuredFinding
from accel_demo.observer.agent import TIMED
from accel_demo.observer.limits import STEPS
from accel_demo.wording import counted

SKIPPED = 3  # steps, in which torch allocates memory and DDP rebuilds its buckets
MEASURED, LEAST_STEPS = 20, 5
SEVERAL, ONE = "several processes", "one process"


@dataclass(frozen=True)
class TimedRun:
    """One run of the script. `samples` counts those that all processes read for a step, or is 0."""

    started: int
    connected: int
    device: str
    threads: int  # per process
    ms_per_step: float
    samples: int


@dataclass(frozen=True)
class OwnScalingRow:
    """The speed of the script with one number of processes. The lists have one value per run."""

    processes: int
    samples_per_step: int  # of all processes, or 0 if the loaders do not say
    samples_per_second: float  # median
    ms_per_step: list[float]
    speedups: list[float]
    median_speedup: float
    interval: list[float]  # 90 % confidence interval of the median speed-up
    efficiency: float


@dataclass(frozen=True)
class OwnScalingResult:
    """How fast a script is in several connected processes and in one."""

    processes: int
    started: int
    device: str
    threads: int  # per process
    command_line: list[str]
    single_command_line: list[str]
    rows: list[OwnScalingRow]  # of one process, and of several
    findings: list[MeasuredFinding]


def measure_script(options) -> OwnScalingResult:
    """Run the reader's command in several processes and in one, several times each.

    The first run is one in several processes. The others are in random order, because the speed of
    the machine changes. All of them use as many threads per process as the first: in one process,
    torch would otherwise use all cores.
    """
    single = copy.copy(options)
    single.command = single_command(options.command, options.processes, "scaling")
    single.processes = None
    choices = {SEVERAL: options, ONE: single}
    limits = {TIMED: "1", STEPS: str(SKIPPED + options.steps)}
    runs: dict[str, list[TimedRun]] = {SEVERAL: [], ONE: []}
    for repeat in range(options.repeats):
        for name in random.Random(repeat).sample([*runs], 2) if repeat else runs:
            say(f"run {repeat + 1} of {options.repeats} in {name}:")
            run = observe(choices[name], "scaling", limits, read_run).content
            check_connected(run, name, options.command)
            runs[name].append(run)
            limits["OMP_NUM_THREADS"] = str(runs[SEVERAL][0].threads)
    return result_of(runs[SEVERAL], runs[ONE], options.command, single.command)


def read_run(evidence: Evidence) -> TimedRun:
    """Return the step time and the samples of a run. Raises `UserError` if it has too few steps."""
    check_complete(evidence)
    measured = [rank.steps()[SKIPPED - 1 :] for rank in evidence.ranks]
    if not measured or min(map(len, measured)) <= LEAST_STEPS:
        raise too_few_steps(evidence)
    last = measured[0][-1]
    return TimedRun(
        started=evidence.world,
        connected=1 if evidence.clones else max(rank.connected_world for rank in evidence.ranks),
        device=last["device"],
        threads=last["threads"],
        ms_per_step=max(
            median(1000 * (after["time"] - before["time"]) for before, after in pairwise(steps))
            for steps in measured
        ),
        samples=round(sum(median(step["samples"] for step in steps[1:]) for steps in measured)),
    )


def check_connected(run: TimedRun, name: str, command: list[str]) -> None:
    """Raise `UserError` unless only the run in several processes has connected several."""
    if name == ONE and run.started > 1:
        raise UserError(f"the command has started several processes: {shlex.join(command)}")
    if name == SEVERAL and run.connected < 2:
        raise UserError(
            f"{processes_in_words(run.connected, run.started)}, and a speed-up needs at least 2 "
            f"connected processes: the reason is found by accel-demo audit -- {shlex.join(command)}"
        )


def result_of(
    several: list[TimedRun], one: list[TimedRun], command: list[str], single: list[str]
) -> OwnScalingResult:
    """Compare the runs in pairs. Each pair was made at about the same time."""
    processes, many, few = several[0].connected, several[0].samples, one[0].samples
    larger = many / few if many and few else processes  # times as many samples in a step
    pairs = zip(one, several, strict=True)
    speedups = [larger * alone.ms_per_step / run.ms_per_step for alone, run in pairs]
    row = row_of(processes, several, speedups)
    return OwnScalingResult(
        processes=processes,
        started=several[0].started,
        device=several[0].device,
        threads=several[0].threads,
        command_line=command,
        single_command_line=single,
        rows=[row_of(1, one, [1.0] * len(one)), row],
        findings=findings_of(row, several[0]),
    )


def row_of(processes: int, runs: list[TimedRun], speedups: list[float]) -> OwnScalingRow:
    return OwnScalingRow(
        processes=processes,
        samples_per_step=runs[0].samples,
        samples_per_second=median(1000 * run.samples / run.ms_per_step for run in runs),
        ms_per_step=[run.ms_per_step for run in runs],
        speedups=speedups,
        median_speedup=median(speedups),
        interval=median_interval(speedups),
        efficiency=median(speedups) / processes,
    )


def findings_of(row: OwnScalingRow, run: TimedRun) -> list[MeasuredFinding]:
    """Return what the measurements say against so many processes."""
    findings, cores = [], usable_cores()
    if run.device == "cpu" and row.processes * run.threads > cores:
        threads = counted(run.threads, "thread")
        text = f"{row.processes} processes with {threads} each share {counted(cores, 'core')}"
        findings.append(MeasuredFinding("shared cores", None, text))
    if row.interval and row.interval[1] < 1:
        text = f"{row.processes} processes are slower than one"
        findings.append(MeasuredFinding("slower", None, text))
    return findings

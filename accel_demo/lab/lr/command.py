"""Train with several rules for adapting a script to N processes, and compare the losses.

accel-demo lr --plot lr.svg
accel-demo lr --processes 1,2,4 --samples 4096

If a script runs on N processes instead of one, its global batch, its learning rate and the length
of its schedule can change. Each row of the table is a training run with one rule for these
settings. All runs train on the same images once. Each loss is compared with the loss of the
single-process run after the same number of images. On one process, all rules are equivalent.
Several seeds, with different weights and orders, show whether a difference is more than chance.
"""

import dataclasses
import math
import os
import statistics
from dataclasses import dataclass

import torch

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab.lr.training import BATCH, LOSSES, RULES, RuleTraining, train_with_rules
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.lab.output import write_outputs
from accel_demo.options import command_parser
from accel_demo.processes import group
from accel_demo.show import COLORS, new_figure, save, table
from accel_demo.wording import counted

SAMPLES, QUICK_SAMPLES = 2048, 1024
SEEDS, QUICK_SEEDS = 9, 1
LEARNING_RATE = 0.01  # low enough for the linear rule to hold: see `LearningRateRow`
TOLERANCE = 1e-5  # weights that differ by no more are "equal"; rounding alone causes about 1e-7
HEAD = ["rule", "processes", "global batch", "steps", "peak learning rate", "schedule ends at"]
HEAD += ["weights", "loss difference", "loss"]
LEGEND = f"""
schedule ends at: images seen when the learning rate reached 0. weights: compared with one process,
within {TOLERANCE}. loss difference: mean distance from the loss curve of one process with the same
seed, at equal images seen. loss: on test images, after all training images. Both are medians over
the seeds. In brackets: 90 % confidence interval of the median."""
STYLES = {  # the other two rules have the same curves as "right" and "global batch ×N"
    "right": {"color": COLORS[0], "linewidth": 1.5},
    "scheduler stepped ×N": {"color": COLORS[3], "linewidth": 1.8, "linestyle": "--"},
    "global batch ×N": {"color": COLORS[2], "linewidth": 1.5, "marker": "s"},
    "global batch ×N, learning rate ×√N": {"color": COLORS[4], "linewidth": 1.5, "marker": "^"},
    "global batch ×N, learning rate ×N": {"color": COLORS[1], "linewidth": 1.5, "marker": "D"},
}
ONE_PROCESS = {"color": "#b8bec5", "linewidth": 6, "solid_capstyle": "butt"}  # drawn first


@dataclass(frozen=True)
class LearningRateRow:
    """The training runs with one rule, compared with the single-process runs with the same seeds.

    The lists `final_losses` and `loss_differences` contain a number for each seed. `losses` are
    medians over the seeds, `largest_weight_difference` is the maximum. With the linear rule, which
    multiplies the learning rate by N, the loss differences are small if the rate is low, because
    one step has about the same effect as N steps with 1/N of the rate.
    Source: Goyal et al., 2017, https://arxiv.org/abs/1706.02677
    """

    rule: str
    processes: int
    global_batch: int
    optimizer_steps: int
    learning_rates: list[tuple[int, float]]  # (images seen, rate)
    schedule_ends_at: int | None  # images seen when the rate reaches 0; None if it never does
    losses: list[tuple[int, float]]  # (images seen, loss on test images)
    final_losses: list[float]
    loss_differences: list[float]  # mean distances from the curve of one process
    largest_weight_difference: float


@dataclass(frozen=True)
class LearningRateResult:
    """All training runs of `accel-demo lr`, beginning with the single-process run."""

    samples: int
    seeds: int
    rows: list[LearningRateRow]


def main(arguments: list[str]) -> int:
    parser = command_parser("lr", __doc__, quick=f"train on {QUICK_SAMPLES} images, with one seed")
    parser.add_process_counts("process counts to compare with one process")
    parser.add_option("--samples", SAMPLES, "training images, each used once", quick=QUICK_SAMPLES)
    parser.add_option("--learning-rate", LEARNING_RATE, "peak learning rate on one process")
    help = "how many seeds to train with"
    parser.add_option("--seeds", SEEDS, help, quick=QUICK_SEEDS, least=1, most=1000)
    options = parser.parse_args(arguments)
    counts, samples, seeds = sorted({1, *options.processes}), options.samples, options.seeds
    check(counts, samples, options.learning_rate)
    if torch.accelerator.device_count() < counts[-1]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # otherwise only some runs would use GPUs

    runs = [
        runs_of_rule
        for count in counts
        for runs_of_rule in measure(count, samples, options.learning_rate, seeds)
    ]
    rows = [compare(runs_of_rule, runs[0]) for runs_of_rule in runs]
    *fewer, most = counts
    connected = f"{', '.join(map(str, fewer))} and {most} connected processes"
    print(f"{connected}; every run sees the same {samples} images once; {counted(seeds, 'seed')}\n")
    print(table(HEAD, [cells_of(row) for row in rows]))
    print(LEGEND)
    result = LearningRateResult(samples, seeds, rows)
    write_outputs(options, "lr", result, lambda result, path: save(draw(result.rows), path))
    return 0


def check(counts: list[int], samples: int, learning_rate: float) -> None:
    """Raise `UserError` unless all runs can record losses after the same numbers of images."""
    if counts == [1]:
        raise UserError("--processes 1 leaves nothing to compare. Use 1,2.")
    for count in counts:
        if BATCH % count:
            raise UserError(f"--processes must divide the batch of {BATCH} images, got {count}")
    unit = LOSSES * BATCH * counts[-1]
    if samples < unit or samples % unit:
        raise UserError(
            f"--samples must be a multiple of {unit} for {counts[-1]} processes, got {samples}"
        )
    load_datasets(TrainConfig(train_samples=samples, learning_rate=learning_rate))


def measure(
    processes: int, samples: int, learning_rate: float, seeds: int
) -> list[list[RuleTraining]]:
    """Train with every rule on `processes` connected processes.

    Return the runs of each rule, one for each seed. On one process, if the runs of all rules are
    identical, return only those of the first rule. Raises `UserError` if a loss is not finite.
    """
    arguments = (samples, learning_rate, RULES, seeds)
    by_rank = group.results_by_rank(train_with_rules, processes, *arguments)
    for runs in zip(*by_rank, strict=True):
        first = runs[0]
        if any(run.processes != processes for run in runs):
            raise RuntimeError(f"started {processes} processes, but a different number connected")
        if not all(map(math.isfinite, first.losses.values())):
            raise UserError(
                f"{first.rule}, processes: {processes}: the loss is not finite. "
                f"Use a --learning-rate below {learning_rate:g}."
            )
        if any(not torch.equal(run.weights, first.weights) for run in runs):
            raise RuntimeError(f"{first.rule}: the processes ended with different weights")
    names = dict.fromkeys(run.rule for run in by_rank[0])
    first, *others = [[run for run in by_rank[0] if run.rule == name] for name in names]
    if processes == 1 and all(
        run.learning_rates == same_seed.learning_rates
        and torch.equal(run.weights, same_seed.weights)
        for runs in others
        for run, same_seed in zip(runs, first, strict=True)
    ):
        return [[dataclasses.replace(run, rule="one process") for run in first]]
    return [first, *others]


def compare(runs: list[RuleTraining], on_one_process: list[RuleTraining]) -> LearningRateRow:
    """Compare the runs of one rule with the single-process runs, which have the same seeds."""
    run, pairs = runs[0], list(zip(runs, on_one_process, strict=True))
    rates = list(run.learning_rates.items())  # the same with every seed
    samples, steps = rates[-1][0], len(rates) - 1
    return LearningRateRow(
        rule=run.rule,
        processes=run.processes,
        global_batch=samples // steps,
        optimizer_steps=steps,
        learning_rates=rates,
        schedule_ends_at=next((seen for seen, rate in rates if rate == 0), None),
        losses=[(seen, statistics.median(run.losses[seen] for run in runs)) for seen in run.losses],
        final_losses=[run.losses[samples] for run in runs],
        loss_differences=[
            statistics.fmean(abs(run.losses[seen] - alone.losses[seen]) for seen in run.losses)
            for run, alone in pairs
        ],
        largest_weight_difference=max(
            (run.weights - alone.weights).abs().max().item() for run, alone in pairs
        ),
    )


def cells_of(row: LearningRateRow) -> list:
    rates = [rate for _, rate in row.learning_rates]
    return [
        *(row.rule, row.processes, row.global_batch, row.optimizer_steps),
        f"{max(rates):.2g}",
        "never" if row.schedule_ends_at is None else row.schedule_ends_at,
        "equal" if row.largest_weight_difference <= TOLERANCE else "different",
        *(median_and_interval(values) for values in (row.loss_differences, row.final_losses)),
    ]


def median_and_interval(values: list[float]) -> str:
    interval, median = median_interval(values), f"{statistics.median(values):.2f}"
    return f"{median} ({interval_text(interval)})" if interval else median


def draw(rows: list[LearningRateRow]):
    """Draw a column for each process count except 1: the learning rates, and the losses below."""
    counts = sorted({row.processes for row in rows if row.processes > 1})
    figure = new_figure(max(6.2, 4.2 * len(counts)), 7)
    grid = figure.subplots(2, len(counts), sharex=True, sharey="row", squeeze=False)
    for (top, bottom), processes in zip(grid.T, counts, strict=True):
        drawn = [row for row in rows if row.processes == processes and row.rule in STYLES]
        for row in (rows[0], *drawn):
            label, style = "one process", ONE_PROCESS
            if row.processes > 1:
                label, style = row.rule, {**STYLES[row.rule], "markersize": 5}
            step_style = {**style, "marker": "", "where": "post"}  # constant until the next step
            top.step(*zip(*row.learning_rates, strict=True), **step_style)
            bottom.plot(*zip(*row.losses, strict=True), label=label, **style)
        top.set_title(f"{processes} processes", fontsize=10)
        bottom.set_xlabel("training images seen by all processes together")
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("learning rate")
    seeds = len(rows[0].final_losses)
    median = "" if seeds == 1 else f", median of {seeds} seeds"
    grid[1, 0].set_ylabel(f"loss on test images{median}")
    handles, names = grid[1, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure

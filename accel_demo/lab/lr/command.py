"""Train with several rules for adapting a script to N processes, and compare the losses.

accel-demo lr --plot lr.svg
accel-demo lr --processes 1,2,4 --samples 4096

If a script runs on N processes instead of one, its global batch, its learning rate and the length
of its schedule can change. Each row of the table is a training run with one rule for these
settings. All runs train on the same images once. Each loss is compared with the loss of the
single-process run after the same number of images. On one process, all rules are equivalent.
"""

import dataclasses
import math
import os
from dataclasses import dataclass

import torch

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab import flags
from accel_demo.lab.lr.training import BATCH, LOSSES, RULES, RuleTraining, train_with_rules
from accel_demo.processes import group
from accel_demo.show import COLOURS, new_figure, save, table

SAMPLES, QUICK_SAMPLES = 2048, 1024
LEARNING_RATE = 0.01  # low enough for the linear rule to hold: see `LearningRateRow`
TOLERANCE = 1e-5  # weights that differ by no more are "equal"; rounding alone causes about 1e-7
HEAD = ["rule", "processes", "global batch", "steps", "peak learning rate", "rate in the last step"]
HEAD += ["schedule ends at", "weights", "loss", "loss difference"]
LEGEND = f"""
schedule ends at: images seen when the learning rate reached 0. weights: compared with one process,
within {TOLERANCE}. loss: on test images, after all training images. loss difference: mean distance
from the loss curve of one process, at equal images seen."""
STYLES = {  # the other two rules have the same curves as "right" and "global batch ×N"
    "right": {"color": COLOURS[0], "linewidth": 1.5},
    "scheduler stepped ×N": {"color": COLOURS[3], "linewidth": 1.8, "linestyle": "--"},
    "global batch ×N": {"color": COLOURS[2], "linewidth": 1.5, "marker": "s"},
    "global batch ×N, learning rate ×√N": {"color": COLOURS[4], "linewidth": 1.5, "marker": "^"},
    "global batch ×N, learning rate ×N": {"color": COLOURS[1], "linewidth": 1.5, "marker": "D"},
}
ONE_PROCESS = {"color": "#b8bec5", "linewidth": 6, "solid_capstyle": "butt"}  # drawn first


@dataclass(frozen=True)
class LearningRateRow:
    """A training run with one rule, compared with the single-process run.

    With the linear rule, which multiplies the learning rate by N, `mean_loss_difference` is small
    if the rate is low, because one step has about the same effect as N steps with 1/N of the rate.
    Source: Goyal et al., 2017, https://arxiv.org/abs/1706.02677
    """

    rule: str
    processes: int
    global_batch: int
    optimizer_steps: int
    learning_rates: list[tuple[int, float]]  # (images seen, rate)
    schedule_ends_at: int | None  # images seen when the rate reaches 0; None if it never does
    losses: list[tuple[int, float]]  # (images seen, loss on test images)
    mean_loss_difference: float
    largest_weight_difference: float


@dataclass(frozen=True)
class LearningRateResult:
    """All training runs of `accel-demo lr`, beginning with the single-process run."""

    samples: int
    rows: list[LearningRateRow]


def main(arguments: list[str]) -> int:
    parser = flags.parser_of("lr", __doc__, quick=f"train on {QUICK_SAMPLES} images")
    help = "process counts to compare with one process (default: 1,2)"
    parser.add_argument("--processes", default="1,2", metavar="N,N", help=help)
    help = f"training images, each used once (default: {SAMPLES})"
    parser.add_argument("--samples", type=int, metavar="N", help=help)
    help = f"peak learning rate on one process (default: {LEARNING_RATE})"
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help=help)
    options = flags.read(parser, arguments)
    counts = sorted({1, *flags.process_counts(options.processes)})
    samples = options.samples
    if samples is None:
        samples = QUICK_SAMPLES if options.quick else SAMPLES
    check(counts, samples, options.learning_rate)
    if torch.accelerator.device_count() < counts[-1]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # otherwise only some runs would use GPUs

    runs = [run for count in counts for run in measure(count, samples, options.learning_rate)]
    rows = [compare(run, runs[0]) for run in runs]
    *fewer, most = counts
    connected = f"{', '.join(map(str, fewer))} and {most} connected processes"
    print(f"{connected}; every run sees the same {samples} images once\n")
    print(table(HEAD, [cells_of(row) for row in rows]))
    print(LEGEND)
    if options.json:
        flags.write_json(options.json, "lr", LearningRateResult(samples, rows))
    if options.plot:
        save(draw(rows), options.plot)
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


def measure(processes: int, samples: int, learning_rate: float) -> list[RuleTraining]:
    """Train with every rule on `processes` connected processes, and return the runs.

    On one process, if all runs are identical, return only the first run. Raises `UserError` if a
    loss is not finite.
    """
    by_rank = group.results_by_rank(train_with_rules, processes, samples, learning_rate, RULES)
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
    first, *others = by_rank[0]
    if processes == 1 and all(
        run.learning_rates == first.learning_rates and torch.equal(run.weights, first.weights)
        for run in others
    ):
        return [dataclasses.replace(first, rule="every rule")]
    return by_rank[0]


def compare(run: RuleTraining, on_one_process: RuleTraining) -> LearningRateRow:
    """Compare a training run with the single-process run."""
    rates = list(run.learning_rates.items())
    samples, steps = rates[-1][0], len(rates) - 1
    distances = [abs(loss - on_one_process.losses[seen]) for seen, loss in run.losses.items()]
    return LearningRateRow(
        rule=run.rule,
        processes=run.processes,
        global_batch=samples // steps,
        optimizer_steps=steps,
        learning_rates=rates,
        schedule_ends_at=next((seen for seen, rate in rates if rate == 0), None),
        losses=list(run.losses.items()),
        mean_loss_difference=sum(distances) / len(distances),
        largest_weight_difference=(run.weights - on_one_process.weights).abs().max().item(),
    )


def cells_of(row: LearningRateRow) -> list:
    rates = [rate for _, rate in row.learning_rates]
    return [
        *(row.rule, row.processes, row.global_batch, row.optimizer_steps),
        *(f"{max(rates):.2g}", f"{rates[-2]:.1g}"),  # no step used rates[-1]
        "never" if row.schedule_ends_at is None else row.schedule_ends_at,
        "equal" if row.largest_weight_difference <= TOLERANCE else "different",
        *(f"{row.losses[-1][1]:.2f}", f"{row.mean_loss_difference:.2f}"),
    ]


def draw(rows: list[LearningRateRow]):
    """Draw a column for each process count except 1: the learning rates, and the losses below."""
    counts = sorted({row.processes for row in rows if row.processes > 1})
    figure = new_figure(max(7.5, 4.2 * len(counts)), 6.6)
    grid = figure.subplots(2, len(counts), sharex=True, sharey="row", squeeze=False)
    for (top, bottom), processes in zip(grid.T, counts, strict=True):
        drawn = [row for row in rows if row.processes == processes and row.rule in STYLES]
        for row in (rows[0], *drawn):
            label, style = "one process", ONE_PROCESS
            if row.processes > 1:
                label = row.rule.replace("×N", f"×{processes}").replace("×√N", f"×√{processes}")
                style = {**STYLES[row.rule], "markersize": 5}
            step_style = {**style, "marker": "", "where": "post"}  # constant until the next step
            top.step(*zip(*row.learning_rates, strict=True), **step_style)
            bottom.plot(*zip(*row.losses, strict=True), label=label, **style)
        top.set_title(f"{processes} processes", fontsize=10)
        bottom.set_xlabel("training images seen by all processes together")
        bottom.legend(frameon=False, fontsize=8)
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("learning rate")
    grid[1, 0].set_ylabel("loss on test images")
    return figure

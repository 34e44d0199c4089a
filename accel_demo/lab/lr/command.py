"""What becomes of learning rate and loss when a script moves to N processes, at equal images seen.

accel-demo lr --plot lr.svg
accel-demo lr --processes 1,2,4 --samples 4096
accel-demo lr --learning-rate 0.05

Every run sees the same images once. On one process all ways to go to N are the same training, and
they are trained there too.
"""

import dataclasses
import math
import os

import torch

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab import flags
from accel_demo.lab.lr.training import (
    BATCH,
    LARGER,
    LINEAR,
    MEASURED,
    RIGHT,
    ROOT,
    STEPPED,
    WAYS,
    RuleResult,
    train_every_way,
)
from accel_demo.processes import group
from accel_demo.show import COLOURS, new_figure, save, table

SAMPLES, QUICK_SAMPLES = 2048, 1024
LEARNING_RATE = 0.01  # so low that a larger one still trains faster: see `distance`
TOLERANCE = 1e-5  # weights closer than that are the same; rounding alone makes about 1e-7
HEAD = "way, processes, global batch, steps, peak learning rate, in the last step, over at, weights"
HEAD = [*HEAD.split(", "), "loss", "off by"]
LEGEND = """
over at: images seen when the schedule was over. weights: the same as on one process, within {}.
loss: of test images, after all training images. off by: the mean distance of the loss curve from
that of one process, at equal images seen."""
STYLES = {  # the ways that are drawn; the other two lie on a line of these
    RIGHT.name: {"color": COLOURS[0], "linewidth": 1.5},
    STEPPED.name: {"color": COLOURS[3], "linewidth": 1.8, "linestyle": "--"},
    LARGER.name: {"color": COLOURS[2], "linewidth": 1.5, "marker": "s"},
    ROOT.name: {"color": COLOURS[4], "linewidth": 1.5, "marker": "^"},
    LINEAR.name: {"color": COLOURS[1], "linewidth": 1.5, "marker": "D"},
}
ONE = {"color": "#b8bec5", "linewidth": 6, "solid_capstyle": "butt"}  # others lie upon it


def main(arguments: list[str]) -> int:
    parser = flags.parser_of("lr", __doc__, quick=f"train on {QUICK_SAMPLES} images")
    help = "numbers of processes to compare with one (default: 1,2)"
    parser.add_argument("--processes", default="1,2", metavar="N,N", help=help)
    help = f"training images, each seen once (default: {SAMPLES})"
    parser.add_argument("--samples", type=int, metavar="N", help=help)
    help = f"peak of the schedule on one process (default: {LEARNING_RATE})"
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help=help)
    options = flags.read(parser, arguments)
    counts = sorted({1, *flags.process_counts(options.processes)})
    samples = options.samples
    if samples is None:
        samples = QUICK_SAMPLES if options.quick else SAMPLES
    check(counts, samples, options.learning_rate)
    if torch.accelerator.device_count() < counts[-1]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # else one process would take a GPU, and two not

    runs = [run for count in counts for run in measure(count, samples, options.learning_rate)]
    *fewer, most = sorted({run.processes for run in runs})
    connected = f"{', '.join(map(str, fewer))} and {most} connected processes"
    print(f"{connected}; every run sees the same {samples} images once\n")
    print(table(HEAD, rows(runs)))
    print(LEGEND.format(TOLERANCE))
    if options.json:
        found = {"samples": samples, "runs": [as_json(run, runs[0]) for run in runs]}
        flags.write_json(options.json, found)
    if options.plot:
        save(draw(runs), options.plot)
    return 0


def check(counts: list[int], samples: int, learning_rate: float) -> None:
    """Raise `UserError` where not every run could be measured after the same numbers of images."""
    if counts == [1]:
        raise UserError("--processes 1 has nothing to compare with: ask for 1,2")
    for count in counts:
        if BATCH % count:
            raise UserError(f"--processes must divide the batch of {BATCH} images, got {count}")
    unit = MEASURED * BATCH * counts[-1]
    if samples < unit or samples % unit:
        raise UserError(
            f"--samples must be a multiple of {unit} for {counts[-1]} processes, got {samples}"
        )
    load_datasets(TrainConfig(train_samples=samples, learning_rate=learning_rate))


def measure(processes: int, samples: int, learning_rate: float) -> list[RuleResult]:
    """Every way in so many connected processes. Those that came out the same on one are one.

    Raises `UserError` where a loss is no longer a number.
    """
    arguments = (train_every_way, processes, samples, learning_rate, WAYS)
    found = group.results_by_rank(*arguments)
    for runs in zip(*found, strict=True):
        if any(run.processes != processes for run in runs):
            raise RuntimeError(f"{processes} processes, and one is connected to other than those")
        if not all(map(math.isfinite, runs[0].losses.values())):
            raise UserError(
                f"{runs[0].way.name}, processes: {processes}: the loss is not a number any more; "
                f"take a --learning-rate below {learning_rate:g}"
            )
        if any(not torch.equal(run.weights, runs[0].weights) for run in runs):
            raise RuntimeError(f"{runs[0].way.name}: the processes have drifted apart")
    first, *others = found[0]
    if processes == 1 and all(is_same_training(first, other) for other in others):
        return [dataclasses.replace(first, way=dataclasses.replace(first.way, name="every way"))]
    return found[0]


def is_same_training(mine: RuleResult, other: RuleResult) -> bool:
    """Whether two runs had the same learning rates and have the same weights, to the last bit."""
    is_same = mine.learning_rates == other.learning_rates
    return is_same and torch.equal(mine.weights, other.weights)


def weights_apart(mine: RuleResult, other: RuleResult) -> float:
    return (mine.weights - other.weights).abs().max().item()


def distance(mine: RuleResult, other: RuleResult) -> float:
    """How far one loss curve is from another: the mean |difference| at equal images seen.

    The linear rule (Goyal et al., 2017, https://arxiv.org/abs/1706.02677) makes it small where
    steps are so small that two of them come to about one that is twice as long.
    """
    apart = [abs(loss - other.losses[seen]) for seen, loss in mine.losses.items()]
    return sum(apart) / len(apart)


def rows(runs: list[RuleResult]) -> list[list]:
    """The cells of the table. The first run is the one on one process."""
    found = []
    for run in runs:
        rates = list(run.learning_rates.values())
        is_same = weights_apart(run, runs[0]) <= TOLERANCE
        found.append(
            [
                *(run.way.name, run.processes, run.global_batch, run.steps),
                *(f"{max(rates):.2g}", f"{rates[-2]:.1g}"),  # the last is for a step never taken
                "never" if run.over_at is None else run.over_at,
                "the same" if is_same else "others",
                *(f"{run.loss:.2f}", f"{distance(run, runs[0]):.2f}"),
            ]
        )
    return found


def as_json(run: RuleResult, one: RuleResult) -> dict:
    return {
        "way": run.way.name,
        "processes": run.processes,
        "global_batch": run.global_batch,
        "optimizer_steps": run.steps,
        "learning_rates": [[seen, rate] for seen, rate in run.learning_rates.items()],
        "schedule_over_after": run.over_at,
        "losses": [[seen, loss] for seen, loss in run.losses.items()],
        "loss_curve_off_by": distance(run, one),
        "weights_off_by": weights_apart(run, one),
    }


def draw(runs: list[RuleResult]):
    """A column for each number of processes above one. The first run is the one on one process."""
    counts = sorted({run.processes for run in runs if run.processes > 1})
    figure = new_figure(max(7.5, 4.2 * len(counts)), 6.6)
    grid = figure.subplots(2, len(counts), sharex=True, sharey="row", squeeze=False)
    for (top, bottom), processes in zip(grid.T, counts, strict=True):
        drawn = [run for run in runs if run.processes == processes and run.way.name in STYLES]
        for run in (runs[0], *drawn):
            label, style = "one process", ONE
            if run.processes > 1:
                label = run.way.name.replace("×N", f"×{processes}").replace("×√N", f"×√{processes}")
                style = {**STYLES[run.way.name], "markersize": 5}
            # A learning rate stays until the next step.
            rates = {**style, "marker": "", "where": "post"}
            top.step(run.learning_rates.keys(), run.learning_rates.values(), **rates)
            bottom.plot(run.losses.keys(), run.losses.values(), label=label, **style)
        top.set_title(f"{processes} processes", fontsize=10)
        bottom.set_xlabel("training images seen by all processes together")
        bottom.legend(frameon=False, fontsize=8)
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("learning rate")
    grid[1, 0].set_ylabel("loss of test images")
    return figure

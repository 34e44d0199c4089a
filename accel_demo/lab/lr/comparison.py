"""Train with every rule, and compare the runs with those on one process."""

import dataclasses
import math
import os
import statistics

import torch

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab.lr.result import LearningRateRow
from accel_demo.lab.lr.rules import RULES
from accel_demo.lab.lr.training import RuleTraining, train_with_rules
from accel_demo.processes import group


def compare_rules(
    counts: list[int], samples: int, learning_rate: float, seeds: int
) -> list[LearningRateRow]:
    """Train with every rule on each number of processes in `counts`, the first of which is 1.

    Raises `UserError` if there are fewer than `samples` images, or if a loss is not finite.
    """
    load_datasets(TrainConfig(train_samples=samples))
    if torch.accelerator.device_count() < counts[-1]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # otherwise only some runs would use GPUs
    runs = [run for count in counts for run in measure(count, samples, learning_rate, seeds)]
    return [compare(runs_of_rule, runs[0]) for runs_of_rule in runs]


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

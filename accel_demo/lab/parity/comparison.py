"""Compare the weights of two runs: how much may they differ, how much do they differ, and why?"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from accel_demo.config import TrainConfig
from accel_demo.lab.parity.pairs import (
    BOUND_STEPS,
    NOTHING,
    SAME_BITS,
    WITHIN_BOUND,
    Pair,
    ParityRow,
    ParityRun,
    StateDifference,
)
from accel_demo.models import make_model


def compare_pairs(
    pairs: list[Pair], config: TrainConfig, environments: dict[ParityRun, dict], folder: Path
) -> list[ParityRow]:
    """Compare the two model.safetensors files of each pair, in the runs' subfolders of `folder`.

    `environments` maps each run to the contents of its environment.json.
    """
    model = make_model(config)
    names = {name for name, _ in model.named_parameters()}
    has_batch_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    rows = []
    for pair in pairs:
        runs = (pair.first, pair.second)
        first, second = (load_file(folder / run.name / "model.safetensors") for run in runs)
        on_gpu = environments[pair.second]["device"] != "cpu"
        replicas = torch.accelerator.device_count() if on_gpu else 1
        row = ParityRow(
            pair=pair.name,
            kind=pair.kind,
            connected_processes=[environments[run]["processes"] for run in runs],
            difference=compare(first, second, names),
            promised=promise(pair, config, has_batch_norm, replicas),
        )
        row.why = reason(row, pair, config, has_batch_norm)
        rows.append(row)
    return rows


def compare(first: dict, second: dict, names: set[str]) -> StateDifference:
    """Compare two state dicts. `names` are the keys of the parameters.

    Raises `ValueError` if the keys or shapes differ.
    """
    if {n: t.shape for n, t in first.items()} != {n: t.shape for n, t in second.items()}:
        raise ValueError("the two files do not contain the same model")
    different = {name for name in first if _bytes(first[name]) != _bytes(second[name])}
    differences: dict[str, float] = {}
    for name in first:
        if first[name].is_floating_point():
            difference = (first[name] - second[name]).abs().nan_to_num(math.inf, math.inf)
            differences[name] = difference.max().item() if name in different else 0.0
    statistics = [differences[name] for name in differences.keys() - names]
    return StateDifference(
        weights=max(differences[name] for name in names),
        statistics=max(statistics, default=None),
        same_weights=not different & names,
        same_file=not different,
    )


def promise(pair: Pair, config: TrainConfig, has_batch_norm: bool, replicas: int) -> str:
    """Return what we promise for this pair on any machine: SAME_BITS, WITHIN_BOUND or NOTHING.

    `replicas` is the number of nn.DataParallel replicas. Swapping two gradients does not change
    their sum, but reordering three or more can change how the sum is rounded. With SGD, rounding
    errors only add up. Adam divides each gradient by its magnitude, and BatchNorm divides each
    channel by its standard deviation. Both divisions can amplify errors in every step, so there is
    no bound.
    """
    is_split = pair.second.script == "train_dp" and replicas > 1
    is_accumulated_by_two = pair.kind == "accumulated" and pair.first.processes == 2
    stays_small = config.optimizer == "sgd" and config.max_steps <= BOUND_STEPS
    if pair.kind == "versions" and not is_split:
        return SAME_BITS
    if is_accumulated_by_two or (stays_small and not has_batch_norm):
        return WITHIN_BOUND
    return NOTHING


def reason(row: ParityRow, pair: Pair, config: TrainConfig, has_batch_norm: bool) -> str:
    """Explain why the two files differ. Return "" if they are identical."""
    difference = row.difference
    if difference.same_file:
        return ""
    if not row.keeps_promise:
        return (
            "a broken promise: the weights differ more than they should, so one script has changed"
        )
    if pair.kind == "versions":
        return "nn.DataParallel splits batches among GPUs and adds gradients in a different order"
    processes, samples = pair.first.processes, pair.first.batch_size
    reasons = []
    if pair.kind == "one batch" and has_batch_norm:
        reasons.append(
            f"BatchNorm normalizes over {processes * samples} images instead of {samples}"
        )
    elif difference.same_weights and processes == 2:
        reasons.append("the weights are equal, because halving is exact and a + b equals b + a")
    elif difference.same_weights:
        reasons.append("the weights are equal by chance: all sums rounded to the same values")
    elif pair.kind == "one batch":
        reasons.append(
            f"one sum over {processes * samples} {config.sample}s rounds differently than several "
            "partial sums"
        )
    elif processes & (processes - 1):  # not a power of two
        reasons.append(
            f"DDP multiplies each gradient by 1/{processes} and adds around a ring, while one "
            "process divides its loss and adds batch by batch: they round at different points"
        )
    else:  # dividing by a power of two is exact
        reasons.append(
            "DDP adds around a ring, but one process adds batch by batch, so they round differently"
        )
    if config.optimizer != "sgd" and not difference.same_weights:
        reasons.append(
            "Adam divides each gradient by its magnitude, so tiny errors become whole steps"
        )
    if pair.kind == "accumulated" and has_batch_norm and not difference.same_weights:
        reasons.append(
            "BatchNorm divides by the standard deviation, so errors grow from step to step"
        )
    if pair.kind == "accumulated" and difference.statistics:
        reasons.append("DDP's running statistics are from rank 0's batches, not from all batches")
    return "; ".join(reasons)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()  # torch.equal would not distinguish 0.0 from -0.0

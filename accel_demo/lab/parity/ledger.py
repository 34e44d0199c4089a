"""Which runs are compared, what they promise each other, and why they differ where they do."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from accel_demo.config import TrainConfig
from accel_demo.lab.parity.runs import ParityRun
from accel_demo.models import make_model

FILES = {
    "plain PyTorch": "train_plain.py",
    "nn.DataParallel": "train_dp.py",
    "raw DDP": "train_ddp.py",
    "Accelerate": "train.py",
}
SAME_BITS, NOTHING = "same bits", "nothing"
# Largest difference of a weight where the same numbers are added in another order. A weight below 1
# is rounded by 3e-8 at most; a few such errors a step, over some steps, stay far below the bound.
BOUND, BOUND_STEPS = 1e-5, 20


@dataclass(frozen=True)
class Pair:
    """Two runs to compare. `kind` is "tellings", "accumulated" or "one batch"."""

    kind: str
    first: ParityRun
    second: ParityRun

    @property
    def name(self) -> str:
        processes, images = self.first.processes, self.first.batch_size
        if self.kind == "tellings":
            return f"{FILES[self.first.telling]} and {FILES[self.second.telling]}"
        if self.kind == "accumulated":
            return f"train.py: {processes} processes, or 1 accumulating {processes} batches"
        return f"train.py: {processes} processes, or 1 with a batch of {processes * images}"


def plan(processes: list[int], batch_size: int) -> list[Pair]:
    """The pairs to compare at these numbers of processes."""
    pairs = []
    for count in processes:
        accelerate = ParityRun("Accelerate", count, batch_size=batch_size)
        others = [name for name in FILES if name != "Accelerate"] if count == 1 else ["raw DDP"]
        for telling in others:
            other = ParityRun(telling, count, batch_size=batch_size)
            pairs.append(Pair("tellings", accelerate, other))
        if count > 1:
            accumulated = ParityRun("Accelerate", 1, accumulate=count, batch_size=batch_size)
            pairs.append(Pair("accumulated", accelerate, accumulated))
            one_batch = ParityRun("Accelerate", 1, batch_size=count * batch_size)
            pairs.append(Pair("one batch", accelerate, one_batch))
    return pairs


def runs_of(pairs: list[Pair]) -> list[ParityRun]:
    """Each run that is in a pair, once."""
    return list(dict.fromkeys(run for pair in pairs for run in (pair.first, pair.second)))


def ledger(pairs: list[Pair], choices: dict, environments: dict, folder: Path) -> list[dict]:
    """A row for each pair, from the model.safetensors of its runs below `folder`.

    `environments` holds each run's environment.json, which says how many processes were connected.
    """
    model = make_model(TrainConfig(**choices))
    names = {name for name, _ in model.named_parameters()}
    has_batch_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    rows = []
    for pair in pairs:
        first, second = (
            load_file(folder / run.name / "model.safetensors") for run in (pair.first, pair.second)
        )
        both = [environments[run] for run in (pair.first, pair.second)]
        rows.append(
            {
                "pair": pair.name,
                "kind": pair.kind,
                "connected_processes": [one["processes"] for one in both],
                **compare(first, second, names),
                **promise(pair, choices, has_batch_norm, _replicas(pair, both)),
            }
        )
        rows[-1]["why"] = reason(rows[-1], pair, choices, has_batch_norm)
    return rows


def compare(first: dict, second: dict, names: set[str]) -> dict:
    """How far two state dicts are apart: in the parameters, which `names` holds, and in the rest.

    The rest are BatchNorm's running statistics (its counters of batches too, for "bitwise" alone);
    None where there are none. Raises ValueError where the two do not have the same entries, and
    takes a NaN for a difference without limit.
    """
    if {n: t.shape for n, t in first.items()} != {n: t.shape for n, t in second.items()}:
        raise ValueError("the two files do not hold the same model")
    is_same = {name: _bytes(tensor) == _bytes(second[name]) for name, tensor in first.items()}
    apart: dict[str, float] = {}
    for name, tensor in first.items():
        if tensor.is_floating_point():
            # A NaN in both is no difference, where the bits are the same.
            difference = 0.0 if is_same[name] else (tensor - second[name]).abs().max().item()
            apart[name] = math.inf if math.isnan(difference) else difference
    return {
        "weights_differ_by": max(apart[name] for name in names),
        "statistics_differ_by": max((apart[name] for name in apart.keys() - names), default=None),
        "same_weights": all(is_same[name] for name in names),
        "same_file": all(is_same.values()),
    }


def promise(pair: Pair, choices: dict, has_batch_norm: bool, replicas: int) -> dict:
    """What holds for this pair, whatever the machine: "same bits", a bound, or nothing.

    `replicas` is how many nn.DataParallel makes, where the pair has it. Two gradients have one sum,
    in whatever order; with three or more, rounding errors differ. SGD adds them up. Adam divides
    each gradient by its own size and BatchNorm each channel by its spread, and so they make some
    errors grow from step to step, faster than a useful bound could.
    """
    is_accumulated_by_two = pair.kind == "accumulated" and pair.first.processes == 2
    stays_small = choices["optimizer"] == "sgd" and choices["max_steps"] <= BOUND_STEPS
    if pair.kind == "tellings" and replicas < 2:
        promised = SAME_BITS
    elif is_accumulated_by_two or (stays_small and not has_batch_norm):
        promised = BOUND
    else:
        promised = NOTHING
    return {"promised": promised}


def has_kept_its_promise(row: dict) -> bool:
    """Where only a bound is promised it is one for the weights."""
    if row["promised"] == SAME_BITS:
        return row["same_file"]
    return row["promised"] == NOTHING or row["weights_differ_by"] <= row["promised"]


def reason(row: dict, pair: Pair, choices: dict, has_batch_norm: bool) -> str:
    """In words, why the two files are not the same; empty where they are."""
    if row["same_file"]:
        return ""
    if not has_kept_its_promise(row):
        return "a broken promise: the two no longer do the same, and one of them has changed"
    if pair.kind == "tellings":
        return "nn.DataParallel splits each batch among the GPUs, and adds in another order"
    processes, images = pair.first.processes, pair.first.batch_size
    why = []
    if pair.kind == "one batch" and has_batch_norm:
        why.append(f"BatchNorm normalises by {processes * images} images instead of {images}")
    elif row["same_weights"] and processes == 2:
        why.append("the same weights: halves are exact, and a + b is b + a")
    elif row["same_weights"]:
        why.append("the same weights, by chance: all sums have been rounded alike")
    elif pair.kind == "one batch":
        why.append(f"one sum over {processes * images} images is rounded in other places")
    elif processes & (processes - 1):
        why.append(
            f"DDP takes 1/{processes} of each gradient and adds around a ring, one process divides "
            "its loss and adds batch after batch: rounded in other places"
        )
    else:
        why.append("DDP adds around a ring, one process batch after batch: rounded in other places")
    if choices["optimizer"] != "sgd" and not row["same_weights"]:
        why.append("Adam divides by a gradient's own size, so tiny errors become whole steps")
    if pair.kind == "accumulated" and has_batch_norm and not row["same_weights"]:
        why.append("BatchNorm divides by a channel's spread, and errors grow from step to step")
    if pair.kind == "accumulated" and row["statistics_differ_by"]:
        why.append("the saved running statistics are of rank 0's batches, or of all")
    return "; ".join(why)


def _bytes(tensor: torch.Tensor) -> bytes:
    """Stricter than torch.equal, for which 0.0 and -0.0 are the same."""
    return tensor.numpy().tobytes()


def _replicas(pair: Pair, environments: list[dict]) -> int:
    """How many replicas nn.DataParallel has made: one for each GPU."""
    on_cpu = environments[1]["device"] == "cpu"
    is_data_parallel = pair.second.telling == "nn.DataParallel"
    return torch.accelerator.device_count() if is_data_parallel and not on_cpu else 1

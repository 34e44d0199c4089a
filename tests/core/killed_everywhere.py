"""Kill and resume many training runs in one launch, and compare each with an uninterrupted run.

accelerate launch --config_file FILE killed_everywhere.py VERSION FOLDER SEED POINTS MODEL

Each combination of settings is tested POINTS times. If POINTS is 1, only four of the eight
combinations are tested, in which each pair of settings occurs. Each time, an exception ends the
training run after a random micro-batch, possibly inside an accumulation window. The run is resumed
from its newest checkpoint. For each resumed run, rank 0 prints a JSON line with the settings, the
number of processes, and which results equal those of an uninterrupted run without loader workers.
"""

import gc
import itertools
import json
import os
import random
import sys
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from accel_demo import train, train_ddp, train_dp, train_plain
from accel_demo.config import TrainConfig
from accel_demo.metrics import batch_totals
from accel_demo.processes.environment import number_in
from accel_demo.run.manifest import newest_complete, verify
from accel_demo.run.resume import Start
from accel_demo.run.run import Run

VERSIONS = {
    "train": train,
    "train_ddp": train_ddp,
    "train_dp": train_dp,
    "train_plain": train_plain,
}
# Each process has seven micro-batches per epoch. With windows of three, the last one has only one.
CHOICES = {"dataset": "synthetic", "model": "small_cnn", "batch_size": 4, "epochs": 2}
CHOICES |= {"test_samples": 20, "eval_batch_size": 10, "log_every": 2, "keep_last": 100}
CHOICES |= {"dropout": 0.3, "augment": True, "clip_norm": 0.5}
TEXT = {"dataset": "text", "model": "tiny_gpt", "augment": False}  # with MODEL tiny_gpt
MICRO_BATCHES = 14
CASES = [*itertools.product((0, 2), (1, 3), ("no", "bf16"))]  # workers, accumulate, precision
PAIRS = [(0, 1, "no"), (2, 1, "bf16"), (0, 3, "bf16"), (2, 3, "no")]
KEPT = ("images", "test_accuracy", "best_test_accuracy")


class Killed(BaseException):
    """An exception that simulates SIGKILL. `except Exception` does not catch it."""


def main(version: str, folder: Path, seed: int, points: int, model: str) -> None:
    warnings.filterwarnings("ignore")
    world_size, draw = number_in("WORLD_SIZE", 1), random.Random(seed)
    for workers, accumulate, precision in PAIRS if points == 1 else CASES:
        choices = CHOICES | (TEXT if model == "tiny_gpt" else {"model": model})
        choices |= {"accumulate": accumulate, "train_samples": 4 * 7 * world_size + 3}
        case = f"accumulate {accumulate}, precision {precision}"
        uninterrupted = folder / case
        if not uninterrupted.exists():
            run(version, choices, precision, uninterrupted)
        case, choices["num_workers"] = f"{workers} workers, {case}", workers
        for _ in range(points):
            every = draw.randint(1, 3)
            first_save = min(every * accumulate, MICRO_BATCHES // 2)
            kill_after = draw.randint(first_save + 1, MICRO_BATCHES)
            choices["checkpoint_every"] = every
            resumed = folder / f"{case}, {kill_after}"
            try:
                with killed_after(kill_after):
                    run(version, choices, precision, resumed)
                raise RuntimeError("the training run was not killed")
            except Killed:
                gc.collect()  # stops the loader workers of the killed run
            saved, _ = newest_complete(resumed)
            saved = verify(saved)["step"]
            start = run(version, {**choices, "resume": "auto"}, precision, resumed)
            if number_in("RANK", 0) == 0:
                report = {"case": case, "killed_after": kill_after, "checkpoint_every": every}
                report |= compare(uninterrupted, resumed)
                report["precision"] = report["precision"] == precision
                report |= {"saved": saved, "resumed": start.step}
                print(json.dumps(report), flush=True)


def run(version: str, choices: dict, precision: str, run_dir: Path) -> Start:
    """Train as if this process had just started. Return the position at which the run starts."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    torch.manual_seed(random.randrange(2**31))  # the result must not depend on this seed
    options = () if version == "train" else (precision,)
    starts, load_checkpoint = [], Run.load_checkpoint

    def recorded_load(run, *arguments):
        starts.append(run.start)
        load_checkpoint(run, *arguments)

    with patch.object(Run, "load_checkpoint", recorded_load):
        VERSIONS[version].main(TrainConfig(**choices, run_dir=str(run_dir)), *options)
    return starts[0]


@contextmanager
def killed_after(micro_batch: int):
    seen = itertools.count(1)

    def counted_totals(logits, labels):
        if logits.requires_grad and next(seen) == micro_batch:  # not in an evaluation
            raise Killed
        return batch_totals(logits, labels)

    with ExitStack() as patches:
        for module in VERSIONS.values():
            patches.enter_context(patch.object(module, "batch_totals", counted_totals))
        yield


def compare(uninterrupted: Path, resumed: Path) -> dict:
    weights, resumed_weights = (
        load_file(run / "model.safetensors") for run in (uninterrupted, resumed)
    )
    environment = json.loads((resumed / "environment.json").read_text())
    ends = [
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        for run in (uninterrupted, resumed)
    ]
    logs = [verify(newest_complete(run)[0])["log"] for run in (uninterrupted, resumed)]
    totals = [torch.tensor(log["epoch_totals"]) for log in logs]
    kept = [{name: log[name] for name in KEPT} for log in logs]
    return {
        "log": kept[0] == kept[1] and torch.allclose(*totals, rtol=1e-5),
        "processes": environment["processes"],
        "precision": environment["mixed_precision"],
        "weights": all(
            torch.equal(weights[name], resumed_weights[name]) for name in weights | resumed_weights
        ),
        "test_loss": ends[0]["test_loss"] == ends[1]["test_loss"],
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])

"""Train, end in the middle of it, resume and compare: many cases in one launch, a line for each.

accelerate launch --config_file FILE tests/core/killed_everywhere.py TELLING FOLDER SEED POINTS

It ends by an exception after one of POINTS random micro-batches, inside a window of accumulation
or at its end, and what counts is what is on the disk then. Each line is JSON: the case, what it ran
on, and what was equal in the end.
"""

import gc
import itertools
import json
import os
import random
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from accel_demo import train, train_ddp, train_dp, train_plain
from accel_demo.config import TrainConfig
from accel_demo.processes.environment import number_in
from accel_demo.run.manifest import newest_whole, verify
from accel_demo.run.resume import Start
from accel_demo.run.run import Run

TELLINGS = {
    "train": train,
    "train_ddp": train_ddp,
    "train_dp": train_dp,
    "train_plain": train_plain,
}
# Seven micro-batches a process and epoch: with windows of three, the last is one of one.
CHOICES = {"dataset": "synthetic", "model": "small_cnn", "batch_size": 4, "epochs": 2}
CHOICES |= {"test_samples": 20, "eval_batch_size": 10, "log_every": 2, "keep_last": 100}
CHOICES |= {"dropout": 0.3, "augment": True, "clip_norm": 0.5}
MICRO_BATCHES = 14
KEPT = ("images", "test_accuracy", "best_test_accuracy")


class Killed(BaseException):
    """In the place of a signal that no process survives."""


def main(telling: str, folder: Path, seed: int, points: int) -> None:
    warnings.filterwarnings("ignore")
    world_size, draw = number_in("WORLD_SIZE", 1), random.Random(seed)
    for workers, accumulate, precision in itertools.product((0, 2), (1, 3), ("no", "bf16")):
        choices = {**CHOICES, "num_workers": workers, "accumulate": accumulate}
        choices["train_samples"] = 4 * 7 * world_size + 3
        case = f"{workers} workers, accumulate {accumulate}, precision {precision}"
        whole = folder / case
        run(telling, choices, precision, whole)
        for _ in range(points):
            every = draw.randint(1, 3)
            first_save = min(every * accumulate, MICRO_BATCHES // 2)
            kill_after = draw.randint(first_save + 1, MICRO_BATCHES)
            choices["checkpoint_every"] = every
            resumed = folder / f"{case}, {kill_after}"
            try:
                with killed_after(kill_after):
                    run(telling, choices, precision, resumed)
                raise RuntimeError("nothing was killed")
            except Killed:
                gc.collect()  # its loader workers end
            saved, _ = newest_whole(resumed)
            saved = verify(saved)["step"]
            start = run(telling, {**choices, "resume": "auto"}, precision, resumed)
            if number_in("RANK", 0) == 0:
                report = {"case": case, "killed_after": kill_after, "checkpoint_every": every}
                report |= compared(whole, resumed)
                report["precision"] = report["precision"] == precision
                report |= {"saved": saved, "resumed": start.step}
                print(json.dumps(report), flush=True)


def run(telling: str, choices: dict, precision: str, run_dir: Path) -> Start:
    """Train once in this process, as if it had just been started; where it began."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    torch.manual_seed(random.randrange(2**31))  # what was left over must not matter
    options = () if telling == "train" else (precision,)
    begun, resume = [], Run.resume

    def noted_resume(run, *arguments):
        begun.append(run.checkpoints.start)
        resume(run, *arguments)

    with patch.object(Run, "resume", noted_resume):
        TELLINGS[telling].main(TrainConfig(**choices, run_dir=str(run_dir)), *options)
    return begun[0]


@contextmanager
def killed_after(micro_batch: int):
    seen, add_totals = itertools.count(1), Run.add_totals

    def counted_totals(run, totals):
        if next(seen) == micro_batch:
            raise Killed
        add_totals(run, totals)

    with patch.object(Run, "add_totals", counted_totals):
        yield


def compared(whole: Path, resumed: Path) -> dict:
    weights, others = (load_file(run / "model.safetensors") for run in (whole, resumed))
    environment = json.loads((resumed / "environment.json").read_text())
    ends = [
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (whole, resumed)
    ]
    logs = [verify(newest_whole(run)[0])["log"] for run in (whole, resumed)]
    totals = [torch.tensor(log["epoch_totals"]) for log in logs]
    kept = [{name: log[name] for name in KEPT} for log in logs]
    return {
        "log": kept[0] == kept[1] and torch.allclose(*totals, rtol=1e-5),
        "processes": environment["processes"],
        "precision": environment["mixed_precision"],
        "weights": all(torch.equal(weights[name], others[name]) for name in weights | others),
        "test_loss": ends[0]["test_loss"] == ends[1]["test_loss"],
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

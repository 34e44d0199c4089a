"""Train in the test's own process, and read and compare the files of training runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from accel_demo import train, train_ddp, train_dp, train_plain
from accel_demo.config import TrainConfig
from accel_demo.processes.environment import rank_environment
from accel_demo.processes.launch import free_port
from accel_demo.run.manifest import checkpoints_of

VERSIONS = {
    "train.py": train,
    "train_plain.py": train_plain,
    "train_dp.py": train_dp,
    "train_ddp.py": train_ddp,
}


class Killed(BaseException):
    """An exception that simulates SIGKILL. `except Exception` does not catch it."""


def train_here(file: str, run: Path, precision: str = "no", **choices) -> Path:
    """Train in this process on the CPU, and return `run`. train_ddp.py is alone in its group."""
    config = TrainConfig(**choices, run_dir=str(run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 0)
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        if file == "train_ddp.py":
            for name, value in rank_environment(0, 1, free_port()).items():
                patch.setenv(name, value)
        if file != "train.py":
            VERSIONS[file].main(config, precision)
            return run
        patch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        try:
            train.main(config)
        finally:
            reset_accelerate()
        return run


def reset_accelerate() -> None:
    """Forget the last `Accelerator`, so that the next one can have different settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def lines_of(run: Path, name: str = "") -> list[dict]:
    """Return the lines of metrics.jsonl that contain `name`, such as "train_loss".

    A last line that is still being written is left out.
    """
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        line for line in map(json.loads, filter(is_complete, lines)) if not name or name in line
    ]


def is_complete(line: str) -> bool:
    return line.endswith("}")


def results_of(run: Path, name: str = "test_loss") -> list[dict]:
    """Return `lines_of` and the summary of a finished run, without the timings."""
    timings = ("images_per_second", "characters_per_second", "train_seconds")
    results = [*lines_of(run, name), read(run / "summary.json")]
    return [{key: line[key] for key in line if key not in timings} for line in results]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def same_weights(*runs: Path) -> bool:
    """Return True if the weights of all runs have the same bits."""
    first, *others = map(weights, runs)
    assert others and all(other.keys() == first.keys() for other in others)
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def names_of_checkpoints(run: Path) -> list[str]:
    """Return the names of the run's checkpoints, oldest first."""
    return [path.name for path in reversed(checkpoints_of(run))]


def interrupt_after(run: Path, newest: str) -> Path:
    """Delete the final results and checkpoints newer than `newest`, as if the run had stopped."""
    newer = checkpoints_of(run)
    for path in newer[: [path.name for path in newer].index(newest)]:
        shutil.rmtree(path)
    (run / "summary.json").unlink()
    (run / "model.safetensors").unlink()
    return run

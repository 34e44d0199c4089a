"""Test that observing a training changes no bit of it."""

import hashlib

import pytest
import torch

from tests.conftest import run_ranks
from tests.observer.test_checks import OBSERVED

FLAGS = "--train-samples 192 --test-samples 100 --batch-size 16 --epochs 2 --accumulate 2"
FLAGS += " --dropout 0.2 --augment --num-workers 1 --checkpoint-every 3"


def sums_of(run) -> dict[str, str]:
    """Return the SHA-256 of each file of the checkpoints, except of the manifests.

    Of the random states, only torch's are seeded.
    """
    sums = {}
    for path in sorted(run.glob("checkpoints/*/*")):
        content = path.read_bytes()
        if path.name.startswith("random_states"):
            states = torch.load(path, weights_only=False)
            content = states.get("torch_manual_seed", states.get("torch")).numpy().tobytes()
        if path.is_file() and "manifest" not in path.name:
            sums[str(path.relative_to(run))] = hashlib.sha256(content).hexdigest()
    return sums


@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_weights_optimizer_and_random_states_are_equal_to_the_bit(file, tmp_path):
    runs = {}
    for name, before in {"plain": [], "observed": [OBSERVED]}.items():
        events = tmp_path / f"{name}-events"
        events.mkdir()
        runs[name] = tmp_path / name
        arguments = [*before, f"accel_demo/{file}", *FLAGS.split(), "--run-dir", runs[name]]
        result = run_ranks(arguments, 2, ACCEL_DEMO_AUDIT=str(events))
        assert result.returncode == 0, result.stderr
        assert "2 processes on cpu" in result.stdout + result.stderr
    assert len(list(events.glob("*.jsonl"))) == 2
    sums = sums_of(runs["plain"])
    assert len(sums) >= 4 and any("random_states" in name for name in sums)
    assert sums == sums_of(runs["observed"])

"""Save and load the training state without Accelerate, in files with its names.

A checkpoint cannot execute code: it is loaded with safetensors and `torch.load(weights_only=True)`.
"""

import random
from pathlib import Path
from typing import cast

import numpy
import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


class TrainingState:
    """The state that one process needs to resume a run.

    `model` is the unwrapped model, not `nn.DataParallel` or DDP, so that the names of the weights
    have no prefix "module.", as in a checkpoint of Accelerate.
    """

    def __init__(self, model, optimizer, scheduler, scaler, rank: int = 0):
        self.rank, self.model = rank, model
        self.others = {
            "optimizer.bin": optimizer,
            "scheduler.bin": scheduler,
            "scaler.pt": scaler,
        }

    def save(self, folder: Path) -> None:
        """Write this process's random states. Rank 0 also writes the state that all ranks share."""
        if self.rank == 0:
            weights = {name: value.contiguous() for name, value in self.model.state_dict().items()}
            save_file(weights, folder / WEIGHTS)
            for name, other in self.others.items():
                torch.save(other.state_dict(), folder / name)
        name, keys, *rest = cast(tuple, numpy.random.get_state())
        states = {
            "python": random.getstate(),
            "numpy": (name, keys.tolist(), *rest),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
        torch.save(states, folder / f"random_states_{self.rank}.pkl")

    def load(self, folder: Path) -> None:
        """Load the files that `save` wrote. A rank without saved random states keeps its own."""
        self.model.load_state_dict(load_file(folder / WEIGHTS))
        for name, other in self.others.items():
            other.load_state_dict(_load(folder / name))
        path = folder / f"random_states_{self.rank}.pkl"
        if path.exists():
            states = _load(path)
            random.setstate(states["python"])
            numpy.random.set_state(states["numpy"])
            torch.set_rng_state(states["torch"])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state_all(states["cuda"])


def _load(path: Path):
    return torch.load(path, map_location="cpu", weights_only=True)

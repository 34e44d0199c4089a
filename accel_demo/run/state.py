"""What `accelerator.save_state` and `accelerator.load_state` do, by hand and with the same files.

Nothing is read in a way that could run code: safetensors, and torch.load with `weights_only`.
"""

import random
from pathlib import Path
from typing import cast

import numpy
import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


class TrainingState:
    """All that a run needs to go on, of one process.

    `model` is the module itself, without what `nn.DataParallel` or DDP puts around it: so the
    weights have the same names at any number of processes.
    """

    def __init__(self, rank: int, model, optimizer, scheduler, scaler):
        self.rank, self.model = rank, model
        self.others = {
            "optimizer.bin": optimizer,
            "scheduler.bin": scheduler,
            "scaler.pt": scaler,
        }

    def save(self, folder: Path) -> None:
        """Rank 0 writes what all have in common; every process writes its random states."""
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
        """Read it again. A rank that did not exist then keeps the random states it has."""
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

"""Save a model that FSDP2 has sharded in two processes, and load it in three.

python tutorials/43_checkpoint.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from accel_demo.processes.group import results_by_rank


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save(device, folder: Path) -> str:
    model, optimizer = make(seed=0)
    train(model, optimizer, steps=2)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return describe(model, optimizer)


def load(device, folder: Path) -> str:
    model, optimizer = make(seed=1)  # other weights
    weights, moments = get_state_dict(model, optimizer)  # tells `load` what this rank needs
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return describe(model, optimizer)


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return how many elements this rank stores, and some weights now and after another step."""
    stored = sum(weight.to_local().numel() for weight in model.parameters())
    now = first_weights(model)
    train(model, optimizer, steps=1)
    return f"{stored:,} elements of {now} …; after another step: {first_weights(model)} …"


def first_weights(model: nn.Module) -> str:
    """Return the first three weights. All ranks must call this, because it gathers them."""
    return " ".join(f"{weight:.6f}" for weight in next(model.parameters()).full_tensor()[0, :3])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.arange(64.0).repeat(2, 1) / 64  # the same rows on each rank
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "checkpoint")
        for function, processes in ((save, 2), (load, 3)):
            print(f"{function.__name__} in {processes} processes:")
            for rank, text in enumerate(results_by_rank(function, processes, folder)):
                print(f"rank {rank} stores {text}")
            if function is save:
                print("files:", *sorted(file.name for file in folder.iterdir()))

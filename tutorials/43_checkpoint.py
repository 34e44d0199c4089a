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


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)  # what this rank needs
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def make() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))


def shard(model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_and_save(device, folder: Path) -> str:
    torch.manual_seed(0)
    model = shard(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, steps=2)
    save(model, optimizer, folder)
    return describe(model, optimizer)


def make_and_load(device, folder: Path) -> str:
    with torch.device("meta"):  # shapes without memory
        model = make()
    model = shard(model).to_empty(device="cpu")  # memory for this rank's shards
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    load(model, optimizer, folder)
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
        for name, function, processes in (("save", make_and_save, 2), ("load", make_and_load, 3)):
            print(f"{name} in {processes} processes:")
            for rank, text in enumerate(results_by_rank(function, processes, folder)):
                print(f"rank {rank} stores {text}")
            if name == "save":
                print("files:", *sorted(file.name for file in folder.iterdir()))

"""Save a model that FSDP2 has sharded, and load it into another number of processes.

torchrun --nproc-per-node 2 tutorials/43_checkpoint.py save
torchrun --nproc-per-node 3 tutorials/43_checkpoint.py load
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FOLDER = Path("runs/sharded")


def main(action: str):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0 if action == "save" else 1)  # other weights, so that loading shows
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if action == "save":
        train(model, optimizer, steps=2)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=FOLDER)
    else:
        weights, moments = get_state_dict(model, optimizer)  # tells `load` what this rank needs
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=FOLDER)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    own = sum(weight.to_local().numel() for weight in model.parameters())
    first = next(model.parameters()).full_tensor()[0, :3].tolist()
    print(f"rank {rank} of {world_size} stores {own:,} elements; the first weights: {first}")
    if rank == 0 and action == "save":
        for file in sorted(FOLDER.iterdir()):
            print(f"{file}: {file.stat().st_size:,} bytes")
    train(model, optimizer, steps=1)  # the next step is the same with any number of processes
    first = next(model.parameters()).full_tensor()[0, :3].tolist()
    if rank == 0:
        print(f"after one more step: {first}")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.arange(64.0).repeat(2, 1) / 64  # the same rows on each rank
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()

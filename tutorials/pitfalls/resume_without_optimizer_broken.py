"""Save the weights, but not the momentum of the optimizer.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/resume_without_optimizer_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def start():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(model, optimizer, batches):
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    data = torch.arange(16.0)[:, None] / 16
    batches = list(DataLoader(data, batch_size=2, sampler=DistributedSampler(data)))
    expected, optimizer = start()
    train(expected, optimizer, batches)
    model, optimizer = start()
    train(model, optimizer, batches[:2])
    checkpoint = {"model": model.module.state_dict()}  # for torch.save
    model, optimizer = start()  # in the next run
    model.module.load_state_dict(checkpoint["model"])
    train(model, optimizer, batches[2:])
    difference = (model.module.weight - expected.module.weight).abs().item()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: the weight differs by {difference:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

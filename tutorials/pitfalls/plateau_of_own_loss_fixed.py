"""Pass the mean loss of all ranks to a `ReduceLROnPlateau`.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/plateau_of_own_loss_fixed.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    data = torch.tensor([[8.0], [2.0]] * 8) + torch.linspace(-0.1, 0.1, 16)[:, None]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        losses = []
        for batch in loader:
            loss = (model(batch / 10) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        scheduler.step(mean)
    rate = torch.tensor(scheduler.get_last_lr())
    rates = [torch.empty_like(rate) for _ in range(dist.get_world_size())]
    dist.all_gather(rates, rate)
    if dist.get_rank() == 0:
        first, second = (each.item() for each in rates)
        print(f"{len(rates)} processes: learning rates {first:.4f} and {second:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

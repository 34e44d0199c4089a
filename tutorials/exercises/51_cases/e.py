"""Case e: train a classifier with a learning rate that falls to 0.

torchrun --standalone --nproc-per-node 2 tutorials/exercises/51_cases/e.py

It prints:

    epoch 1 ends after step 32: learning rate 0.067
    epoch 2 ends after step 64: learning rate 0.033
    epoch 3 ends after step 96: learning rate 0.000
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_demo.data import packaged_set

GLOBAL_BATCH_SIZE, EPOCHS = 64, 3


def make_loader(dataset, rank, world_size):
    """Return a loader with a new order in each epoch, and the sampler that divides the data."""
    sampler = DistributedSampler(dataset, world_size, rank)
    generator = torch.Generator().manual_seed(rank)
    batch_size = GLOBAL_BATCH_SIZE // world_size
    loader = DataLoader(dataset, batch_size, shuffle=True, generator=generator)
    return loader, sampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set = TensorDataset(*packaged_set("train")[:1024])
    loader, sampler = make_loader(train_set, rank, world_size)
    layers = nn.Linear(784, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), *layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS * len(loader))
    torch.manual_seed(rank)
    steps = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
        learning_rate = scheduler.get_last_lr()[0]
        if rank == 0:
            print(f"epoch {epoch + 1} ends after step {steps}: learning rate {learning_rate:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

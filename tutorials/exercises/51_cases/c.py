"""Case c: train a classifier, and let each rank test it.

torchrun --standalone --nproc-per-node 2 tutorials/exercises/51_cases/c.py

It prints:

    epoch 1: 16 steps, loss 1.52
    epoch 2: 16 steps, loss 0.96
    epoch 3: 16 steps, loss 0.78
    rank 0: 373 of 500 images correct
    rank 1: 331 of 500 images correct
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_demo.data import packaged_set

GLOBAL_BATCH_SIZE, EPOCHS = 64, 3


class Trainer:
    def __init__(self, net):
        self.net = net
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, images, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def correct(self, images, labels):
        with torch.no_grad():
            return (self.model(images).argmax(dim=1) == labels).sum().item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    train_set = TensorDataset(*packaged_set("train")[:1024])
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, GLOBAL_BATCH_SIZE // world_size, sampler=sampler)
    trainer = Trainer(nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = [trainer.training_step(images, labels) for images, labels in loader]
        mean = torch.tensor(sum(losses) / len(losses) / world_size)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1}: {len(loader)} steps, loss {mean:.2f}", flush=True)
    dist.barrier()
    correct = trainer.correct(*packaged_set("test")[:500])  # the same images on both ranks
    print(f"rank {rank}: {correct} of 500 images correct", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

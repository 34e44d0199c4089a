"""The same program with DDP: torchrun --standalone --nproc-per-node 2 tutorials/11_ddp.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.data import packaged_set


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    train_set, test_set = packaged_set("train"), packaged_set("test")
    sampler = DistributedSampler(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=500, sampler=test_sampler)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.4f}")

    correct = torch.tensor(0, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    if dist.get_rank() == 0:
        print(f"test accuracy: {correct.item() / len(test_set):.4f}")
    dist.destroy_process_group()
    return model.module


if __name__ == "__main__":
    main()

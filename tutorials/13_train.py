"""Train on Fashion-MNIST with DDP. The loss falls, but four things are wrong.

torchrun --standalone --nproc-per-node 2 tutorials/13_train.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.data import packaged_set

EPOCHS = 5
FOLDER = Path("runs/page_13")


def new_network():
    layers = nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def evaluate(network, loader, device):
    counts = torch.zeros(2, device=device)  # correct predictions, and all
    network.eval()
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            counts[0] += (network(images).argmax(dim=1) == labels).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    correct, total = counts.tolist()
    return correct / total


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # a different dropout mask on each rank

    train_set, test_set = packaged_set("train"), packaged_set("test")
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=64, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, batch_size=500, sampler=test_sampler)
    network = new_network().to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    FOLDER.mkdir(parents=True, exist_ok=True)
    best = 0.0
    for epoch in range(EPOCHS):
        network.train()
        sums = torch.zeros(2, device=device)  # of the losses, and of the images
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        accuracy = evaluate(network, test_loader, device)
        loss = (sums[0] / sums[1]).item()
        with open(FOLDER / "log.csv", "a") as log:
            log.write(f"{epoch + 1},{loss},{accuracy}\n")
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy:.4f}")
            if accuracy > best:
                best = accuracy
                torch.save(network.state_dict(), FOLDER / "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

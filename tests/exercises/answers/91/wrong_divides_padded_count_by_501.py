# wrong: correct predictions after epoch 0 instead of
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from accel_demo.data import packaged_set


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = x.view(-1, 28 * 28)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


def evaluate(net, loader, device):
    """Return the correct predictions and the images of this rank and of all ranks together."""
    net.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            counts[0] += (net(images).argmax(dim=1) == labels).sum()
            counts[1] += labels.size(0)
    dist.all_reduce(counts)
    return counts.tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=".")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    train_set = Subset(packaged_set("train"), range(1024))
    test_set = Subset(packaged_set("test"), range(501))
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    torch.manual_seed(0)
    net = Net().to(device)
    ddp = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    saved = sorted(args.folder.glob("epoch_*.pth"))
    if saved:
        state = torch.load(saved[-1], map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    for epoch in range(len(saved), args.epochs):
        ddp.train()
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(ddp(images), labels)
            loss.backward()
            optimizer.step()
        correct, _ = evaluate(net, test_loader, device)
        total = len(test_set)
        if rank == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            with open(args.folder / "new", "wb") as file:
                torch.save(state, file)
            (args.folder / "new").rename(args.folder / f"epoch_{epoch:04}.pth")
            print(f"epoch {epoch}: {correct} of {total} test images correct")
    if rank == 0:
        torch.save(net.state_dict(), args.folder / "model.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

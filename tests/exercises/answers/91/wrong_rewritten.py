# wrong: it works, but 1
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


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, pixels):
        pixels = pixels.view(-1, 28 * 28)
        pixels = F.relu(self.fc1(pixels))
        return self.fc2(pixels)


def evaluate(model, loader, device):
    """Return the correct predictions and the images of this rank and of all ranks together."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            totals[0] += (model(inputs).argmax(dim=1) == targets).sum()
            totals[1] += targets.size(0)
    dist.all_reduce(totals)
    return totals.tolist()


def main():
    command_line = argparse.ArgumentParser()
    command_line.add_argument("--folder", type=Path, default=".")
    command_line.add_argument("--epochs", type=int, default=4)
    options = command_line.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data = Subset(packaged_set("train"), range(1024))
    # Each image belongs to one rank, so nothing is padded.
    test_data = Subset(packaged_set("test"), range(rank, 501, world_size))
    train_sampler = DistributedSampler(train_data)
    train_batches = DataLoader(train_data, batch_size=32, sampler=train_sampler)
    test_batches = DataLoader(test_data, batch_size=100)

    torch.manual_seed(0)
    model = Network().to(device)
    ddp = DistributedDataParallel(model)
    loss_function = nn.CrossEntropyLoss()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    saved = sorted(options.folder.glob("epoch_*.pth"))
    if saved:
        state = torch.load(saved[-1], map_location=device)
        model.load_state_dict(state["net"])
        sgd.load_state_dict(state["optimizer"])

    for number in range(len(saved), options.epochs):
        ddp.train()
        train_sampler.set_epoch(number)
        for inputs, targets in train_batches:
            inputs, targets = inputs.to(device), targets.to(device)
            sgd.zero_grad()
            loss = loss_function(ddp(inputs), targets)
            loss.backward()
            sgd.step()
        hits, seen = evaluate(model, test_batches, device)
        if rank == 0:
            state = {"net": model.state_dict(), "optimizer": sgd.state_dict()}
            with open(options.folder / "new", "wb") as file:
                torch.save(state, file)
            (options.folder / "new").rename(options.folder / f"epoch_{number:04}.pth")
            print(f"epoch {number}: {hits} of {seen} test images correct")
    if rank == 0:
        torch.save(model.state_dict(), options.folder / "model.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

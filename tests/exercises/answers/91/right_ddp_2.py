"""A port of the old script, written by a reader of page 91."""

import argparse
import os

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
    """Count each test image once. Every rank calls this, and all get the same result."""
    net.eval()
    with torch.no_grad():
        hits = torch.cat([net(x.to(device)).argmax(dim=1) == y.to(device) for x, y in loader])
    hits = hits.long()
    gathered = [torch.empty_like(hits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, hits)
    hits = torch.stack(gathered, dim=1).flatten()[: len(loader.dataset)]  # without the padding
    return hits.sum().item(), len(hits)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=str, default=".")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    train_set = Subset(packaged_set("train"), range(1024))
    test_set = Subset(packaged_set("test"), range(501))
    train_sampler = DistributedSampler(train_set, seed=0)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    torch.manual_seed(0)
    net = DistributedDataParallel(Net().to(device))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    path = os.path.join(args.folder, "checkpoint.pth")
    finished = 0
    if os.path.exists(path):
        checkpoint = torch.load(path, map_location=device)
        net.module.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        finished = checkpoint["finished"]

    for epoch in range(finished, args.epochs):
        train_sampler.set_epoch(epoch)
        net.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
        correct, total = evaluate(net, test_loader, device)
        if dist.get_rank() == 0:
            checkpoint = {
                "net": net.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "finished": epoch + 1,
            }
            torch.save(checkpoint, path + ".unfinished")
            os.replace(path + ".unfinished", path)
            print(f"epoch {epoch}: {correct} of {total} test images correct", flush=True)

    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), os.path.join(args.folder, "model.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

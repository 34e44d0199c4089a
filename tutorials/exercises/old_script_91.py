"""The old script of exercise 91, unchanged: the check compares a port with it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable
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


def evaluate(net, loader, local_rank):
    net.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for images, labels in loader:
            images = Variable(images.cuda(local_rank))
            labels = Variable(labels.cuda(local_rank))
            _, predicted = torch.max(net(images).data, 1)
            correct += (predicted == labels).sum().item()
            total += labels.size(0)
    return correct, total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--folder", type=str, default=".")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    local_rank = args.local_rank
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", init_method="env://")

    train_set = Subset(packaged_set("train"), range(1024))
    test_set = Subset(packaged_set("test"), range(501))
    train_sampler = DistributedSampler(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    torch.manual_seed(0)
    net = Net().cuda(local_rank)
    net = DistributedDataParallel(net, device_ids=[local_rank], output_device=[local_rank])
    path = os.path.join(args.folder, "net.pth")
    if os.path.exists(path):
        net = torch.load(path)
    criterion = nn.CrossEntropyLoss().cuda(local_rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    for epoch in range(args.epochs):
        net.train()
        for images, labels in train_loader:
            images = Variable(images.cuda(local_rank))
            labels = Variable(labels.cuda(local_rank))
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
        correct, total = evaluate(net, test_loader, local_rank)
        torch.save(net, path)
        if local_rank == 0:
            print(f"epoch {epoch}: {correct} of {total} test images correct")


if __name__ == "__main__":
    main()

"""Exercise 91: port an old DDP script.

The script below is in the style of 2019 to 2022. It no longer runs, and it has mistakes that nobody
noticed when it did. Port it to plain DDP or to Accelerate, whichever you prefer. The check hides
all GPUs and starts your script with this command, where `N` is 1 or 2:

    torchrun --standalone --nproc-per-node N tutorials/exercises/91_port.py --folder F --epochs E

`F` is an existing folder that all processes share. Graded:

1. Training. All processes train one network together. Keep the network and its initial weights, the
   optimizer and its settings, and the batch size, which is per process. Epochs are counted from 0.
   In epoch `e`, the training images have the order of `DistributedSampler(train_set, seed=0)` after
   `set_epoch(e)`. (Accelerate uses the same order if the loader has `shuffle=True`, you pass
   `DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)` and you call the prepared
   loader's `set_epoch(e)`.)
2. Evaluation. After each epoch, the main process alone prints a line like the one below, which
   counts each of the 501 test images once. Other lines may be printed too.

       epoch 2: 407 of 501 test images correct

3. Checkpoints. After each epoch, before its line is printed, save a checkpoint in `F`, in any
   format. If all processes are killed when the line appears and started again with the same
   command, training continues with the next epoch and ends with the same weights as without a kill.
   To try it, press Ctrl-C when a line appears. (Page 35 shows how to survive a kill during a save,
   which isn't graded here.)
4. Result. At the end, `F/model.pth` contains the `state_dict` of the network itself, with keys such
   as `fc1.weight`, and `torch.load(..., weights_only=True)` can load it.
5. Files. No two processes write the same file. (Accelerate's `save_state` is allowed: each process
   calls it, and each writes different files.)
6. Size. At most 100 lines differ from the old script, counting removed and added lines. Imports,
   docstrings, comments, blank lines and indentation don't count.

The weights may differ from the expected ones by up to 1e-4. A copy of the old script is in
old_script_91.py, so you can look at your changes with `diff`, which counts more lines than the
check: also those of imports and of this docstring.

accel-demo check 91
"""

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

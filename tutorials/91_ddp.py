"""The script of 91_old.py as you would write it today, with DDP. It runs on GPUs or on the CPU.

torchrun --standalone --nproc-per-node 2 tutorials/91_ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="data", help="folder of MNIST and of my_net.pth")
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
if local_rank == 0:
    datasets.MNIST(options.folder, download=True)
dist.barrier()
data_set = datasets.MNIST(options.folder, transform=transform)
sampler = DistributedSampler(data_set)
loader = DataLoader(data_set, batch_size=256, sampler=sampler)

net = models.resnet101(num_classes=10)
net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
net = net.to(device)
net = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()

for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        loss = loss_function(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            mean_loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean_loss)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}, step {step}: loss {mean_loss:.4f}")

if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), f"{options.folder}/my_net.pth")
dist.destroy_process_group()

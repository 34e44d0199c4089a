"""A DDP script as many articles from 2019-2022 show it. Its mistakes are deliberate; see page 91.

python -m torch.distributed.launch --nproc_per_node=2 tutorials/91_old.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0, help="supplied by the launcher")
local_rank = parser.parse_args().local_rank

dist.init_process_group("nccl", init_method="env://")
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)

transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (1.0,))])
data_set = datasets.MNIST("data", download=True, transform=transform)
sampler = DistributedSampler(data_set)
loader = DataLoader(data_set, batch_size=256, sampler=sampler)

net = models.resnet101(num_classes=10)
net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
net = net.to(device)
net = DistributedDataParallel(net, device_ids=[device], output_device=[device])
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()

for epoch in range(10):
    sampler.set_epoch(epoch)
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        loss = loss_function(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and local_rank == 0:
            print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")

if local_rank == 0:
    torch.save(net, "my_net.pth")

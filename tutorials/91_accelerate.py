"""The script of 91_ddp.py with Accelerate. It runs on GPUs or on the CPU.

torchrun --standalone --nproc-per-node 2 tutorials/91_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="data", help="folder of MNIST and of my_net.pth")
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())

transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
with accelerator.local_main_process_first():
    data_set = datasets.MNIST(options.folder, download=True, transform=transform)
loader = DataLoader(data_set, batch_size=256, shuffle=True)

net = models.resnet101(num_classes=10)
net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
loss_function = nn.CrossEntropyLoss()

for epoch in range(options.epochs):
    for step, (images, labels) in enumerate(loader):
        loss = loss_function(net(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 10 == 0:
            mean_loss = accelerator.reduce(loss.detach(), "mean")
            if accelerator.is_main_process:
                print(f"epoch {epoch}, step {step}: loss {mean_loss:.4f}")

state_dict = accelerator.get_state_dict(net)
if accelerator.is_main_process:
    torch.save(state_dict, f"{options.folder}/my_net.pth")
accelerator.end_training()

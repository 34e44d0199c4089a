"""A script whose dataset takes 2 ms per sample with --fault, and nearly nothing without."""

import sys
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.002 * ("--fault" in sys.argv))
        return torch.full((3, 16, 16), index / 4000), index % 10


accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(32, 32, 3, padding=1),
    torch.nn.Flatten(),
    torch.nn.Linear(32 * 256, 10),
)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
loader = DataLoader(Images(), 32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(epoch, loss.item())
accelerator.end_training()

# wrong: save the checkpoint before you print the line
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Subset

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


class Progress:
    """The number of finished epochs. Accelerate saves it in every checkpoint."""

    epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def evaluate(net, loader, accelerator):
    net.eval()
    correct, total = 0, 0
    for images, labels in loader:
        with torch.no_grad():
            outputs = net(images)
        outputs, labels = accelerator.gather_for_metrics((outputs, labels))
        correct += (outputs.argmax(dim=1) == labels).sum().item()
        total += labels.size(0)
    return correct, total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=str, default=".")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )

    train_set = Subset(packaged_set("train"), range(1024))
    test_set = Subset(packaged_set("test"), range(501))
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)

    torch.manual_seed(0)
    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    net, optimizer = accelerator.prepare(net, optimizer)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    path = os.path.join(args.folder, "checkpoint")
    if os.path.isdir(path):
        accelerator.load_state(path)

    for epoch in range(progress.epochs, args.epochs):
        net.train()
        train_loader.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        correct, total = evaluate(net, test_loader, accelerator)
        accelerator.print(f"epoch {epoch}: {correct} of {total} test images correct")
        progress.epochs = epoch + 1
        accelerator.save_state(path)
    state_dict = accelerator.get_state_dict(net)
    accelerator.save(state_dict, os.path.join(args.folder, "model.pth"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

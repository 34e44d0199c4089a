"""A port of the old script, written by a reader of page 91."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
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


def evaluate(net, loader, accelerator):
    net.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for images, labels in loader:
            results = (net(images).argmax(dim=1), labels)
            predicted, labels = accelerator.gather_for_metrics(results)
            correct += (predicted == labels).sum().item()
            total += labels.size(0)
    return correct, total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=str, default=".")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    seedable = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=seedable)

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
    path = os.path.join(args.folder, "checkpoint.pth")
    start = 0
    if os.path.exists(path):
        checkpoint = torch.load(path, map_location="cpu")
        accelerator.unwrap_model(net).load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["epochs"]

    for epoch in range(start, args.epochs):
        train_loader.set_epoch(epoch)
        net.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        correct, total = evaluate(net, test_loader, accelerator)
        if accelerator.is_main_process:
            checkpoint = {
                "net": accelerator.unwrap_model(net).state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs": epoch + 1,
            }
            torch.save(checkpoint, path + ".unfinished")
            os.replace(path + ".unfinished", path)
        accelerator.print(f"epoch {epoch}: {correct} of {total} test images correct")

    state_dict = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.save(state_dict, os.path.join(args.folder, "model.pth"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

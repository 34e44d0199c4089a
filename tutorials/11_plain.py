"""Train a small network on one device: python tutorials/11_plain.py"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from accel_demo.data import packaged_set


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    train_set, test_set = packaged_set("train"), packaged_set("test")
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(2):
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.4f}")

    correct = torch.tensor(0, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(dim=1) == labels).sum()
    print(f"test accuracy: {correct.item() / len(test_set):.4f}")
    return model


if __name__ == "__main__":
    main()

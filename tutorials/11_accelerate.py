"""The same program with Accelerate.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml tutorials/11_accelerate.py

On a machine with GPUs, leave out --config_file to start one process per GPU.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from accel_demo.data import packaged_set


def main(**options):
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), **options)
    torch.manual_seed(0)
    train_set, test_set = packaged_set("train"), packaged_set("test")
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=500)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    for epoch in range(2):
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.4f}")

    correct = torch.tensor(0, device=accelerator.device)
    with torch.no_grad():
        for images, labels in test_loader:
            results = (model(images).argmax(dim=1), labels)
            predictions, labels = accelerator.gather_for_metrics(results)
            correct += (predictions == labels).sum()
    accelerator.print(f"test accuracy: {correct.item() / len(test_set):.4f}")
    accelerator.end_training()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main()

"""Exercise 13: repair five faults in a training script.

The script runs without an error and prints its results, but five things are wrong. To find them:

    accel-demo audit tutorials/exercises/13_five_faults.py

Repair them in this file, and run the audit again. Keep what the script is meant to do:

- Train for 3 epochs on the same 768 images, 32 per process and batch. `accumulate` adds up the
  gradients of two batches, so two processes take 18 optimizer steps.
- Train all of the network, including its new last layer, from the weights that `initialize` sets.
- Lower the learning rate after each optimizer step: 0.2 in the first, 0.2 / 18 in the last.
- Save the network's weights in runs/exercise_13/network.pt.

The check starts the script in two processes and makes the same checks as the audit. They must find
no errors and no warnings, and the script must still do all of the above.

accel-demo check 13
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.data import packaged_set

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 32, 2
FOLDER = Path("runs/exercise_13")


class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, classes)

    def forward(self, images):
        return self.head(self.body(images))


def initialize(layer):
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)


def main():
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=ACCUMULATE)
    set_seed(0, device_specific=True)  # a different dropout mask on each rank
    train_set = TensorDataset(*packaged_set("train")[:768])
    test_set = TensorDataset(*packaged_set("test")[:500])
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=250)

    network = Network(classes=100)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    network.head = nn.Linear(32, 10)  # these images have 10 classes
    global_batch = BATCH_SIZE * ACCUMULATE * accelerator.num_processes
    steps = EPOCHS * len(train_set) // global_batch
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    model, optimizer, test_loader = accelerator.prepare(network, optimizer, test_loader)
    model.apply(initialize)

    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(accelerator.device), labels.to(accelerator.device)
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
        model.eval()
        correct = 0
        for images, labels in test_loader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == labels).sum().item()
        accelerator.print(f"epoch {epoch + 1}: {correct} of {len(test_set)} test images correct")

    FOLDER.mkdir(parents=True, exist_ok=True)
    accelerator.save(accelerator.unwrap_model(model).state_dict(), FOLDER / "network.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()

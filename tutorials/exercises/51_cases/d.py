"""Case d: train a classifier on images that are shifted at random.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/exercises/51_cases/d.py

It prints:

    epoch 1: 16 steps, 284 of 501 images correct
    epoch 2: 16 steps, 332 of 501 images correct
    epoch 3: 16 steps, 341 of 501 images correct
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.data import packaged_set

GLOBAL_BATCH_SIZE, EPOCHS = 64, 3


def shifted(images):
    """Return the images of a batch, each shifted by at most two pixels in both directions."""
    shifts = torch.randint(-2, 3, (len(images), 2)).tolist()
    pairs = zip(images, shifts, strict=True)
    return torch.stack([image.roll(shift, dims=(-2, -1)) for image, shift in pairs])


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train_set = TensorDataset(*packaged_set("train")[:1024])
    test_set = TensorDataset(*packaged_set("test")[:501])
    batch_size = GLOBAL_BATCH_SIZE // accelerator.num_processes
    train_loader = DataLoader(train_set, batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(shifted(images)), labels))
            optimizer.step()
        model.eval()
        hits = []
        for images, labels in test_loader:
            with torch.no_grad():
                hits.append(model(images).argmax(dim=1) == labels)
            hits[-1] = accelerator.gather_for_metrics(hits[-1])
        hits = torch.cat(hits)
        share = f"{hits.sum()} of {len(hits)} images correct"
        accelerator.print(f"epoch {epoch + 1}: {len(train_loader)} steps, {share}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

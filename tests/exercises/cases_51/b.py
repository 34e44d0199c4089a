"""Write the log of case b: `gather` keeps the samples that fill up the last batch.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tests/exercises/cases_51/b.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.data import packaged_set

GLOBAL_BATCH_SIZE, EPOCHS, TEST_BATCH_SIZE = 64, 4, 36


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0, device_specific=True)
    train_set = TensorDataset(*packaged_set("train")[:1024])
    test_set = TensorDataset(*packaged_set("test")[:1000])
    batch_size = GLOBAL_BATCH_SIZE // accelerator.num_processes
    train_loader = DataLoader(train_set, batch_size, shuffle=True)
    test_loader = DataLoader(test_set, TEST_BATCH_SIZE)
    layers = nn.Linear(784, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    accelerator.print(
        f"processes={accelerator.num_processes} train_images={len(train_set)} "
        f"test_images={len(test_set)} global_batch_size={GLOBAL_BATCH_SIZE} epochs={EPOCHS} "
        "learning_rate=0.1 schedule=constant"
    )
    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        hits = []
        with torch.no_grad():
            for images, labels in test_loader:
                hits.append(accelerator.gather(model(images).argmax(dim=1) == labels))
        hits = torch.cat(hits)
        accelerator.print(
            f"epoch {epoch + 1}: {len(losses)} steps, loss {sum(losses) / len(losses):.2f}, "
            f"test: {hits.sum()} right, {(~hits).sum()} wrong, accuracy {hits.float().mean():.4f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Write the log of case a: the prepared scheduler advances once per process.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tests/exercises/cases_51/a.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.data import packaged_set

GLOBAL_BATCH_SIZE, EPOCHS = 64, 4


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0, device_specific=True)
    train_set = TensorDataset(*packaged_set("train")[:1024])
    batch_size = GLOBAL_BATCH_SIZE // accelerator.num_processes
    loader = DataLoader(train_set, batch_size, shuffle=True)
    layers = nn.Linear(784, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps_per_epoch = len(train_set) // GLOBAL_BATCH_SIZE
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS * steps_per_epoch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.print(
        f"processes={accelerator.num_processes} train_images={len(train_set)} "
        f"global_batch_size={GLOBAL_BATCH_SIZE} epochs={EPOCHS} learning_rate=0.1 "
        "schedule=linear_to_0"
    )
    step = 0
    for epoch in range(EPOCHS):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            loss = accelerator.reduce(loss.detach(), "mean")
            if step % 8 == 0:
                rate = scheduler.get_last_lr()[0]
                accelerator.print(
                    f"epoch {epoch + 1} step {step:2}: learning rate {rate:.4f}, loss {loss:.2f}"
                )
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    sums = accelerator.gather(weights.double().sum()[None]).tolist()
    accelerator.print("sum of the weights, by rank:", *(f"{each:.6f}" for each in sums))
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Exercise 34: resume with identical results, wherever the run was killed."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu

SEED, EPOCHS, BATCH_SIZE, ACCUMULATE = 7, 3, 4, 2
SAVE_AFTER = (3, 7)  # save after 3 and 7 batches of each epoch, or at the end of that window


class Position:
    """How far the run has come. Accelerate saves it with each checkpoint."""

    def __init__(self):
        self.epoch = self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def train(folder: Path, dataset, begin_batch) -> torch.nn.Module:
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)
    accelerator = Accelerator(
        cpu=use_cpu(), gradient_accumulation_steps=ACCUMULATE, dataloader_config=order
    )
    set_seed(SEED, device_specific=True)  # so that dropout differs between processes
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, generator=torch.Generator())
    layers = torch.nn.Dropout(0.2), torch.nn.Linear(8, 99), torch.nn.ReLU(), torch.nn.Linear(99, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    position = Position()
    accelerator.register_for_checkpointing(position)

    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        # Settle DDP's buckets: their order is final only after a first backward pass.
        accelerator.backward(model(torch.ones(1, 8, device=accelerator.device)).sum())
        optimizer.zero_grad()
        accelerator.load_state(checkpoint)

    while position.epoch < EPOCHS:
        loader.set_epoch(position.epoch)
        rest = accelerator.skip_first_batches(loader, position.batches)
        save_is_due = False
        for numbers, inputs, targets in rest:
            begin_batch(numbers)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            position.batches += 1
            save_is_due |= position.batches in SAVE_AFTER
            if save_is_due and accelerator.sync_gradients:
                accelerator.save_state(checkpoint)
                save_is_due = False
        position.epoch, position.batches = position.epoch + 1, 0
    return accelerator.unwrap_model(model)

"""A model answer to exercise 34."""

from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, RandomSampler

from accel_demo.processes.devices import use_cpu

SEED, EPOCHS, BATCH_SIZE, ACCUMULATE = 7, 3, 4, 2
SAVE_AFTER = (3, 7)  # save after 3 and 7 batches of each epoch


class Position:
    """The position in the training run. Accelerate saves it in every checkpoint."""

    epoch, batches = 0, 0

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]


def train(folder: Path, dataset, begin_batch) -> torch.nn.Module:
    accelerator = Accelerator(
        cpu=use_cpu(),
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
    )
    set_seed(SEED, device_specific=True)  # so that dropout differs between processes
    generator = torch.Generator().manual_seed(accelerator.process_index)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=RandomSampler(dataset), generator=generator)
    layers = torch.nn.Dropout(0.2), torch.nn.Linear(8, 99), torch.nn.ReLU(), torch.nn.Linear(99, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    position = Position()
    accelerator.register_for_checkpointing(position)

    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        model(dataset[:BATCH_SIZE][1]).sum().backward()  # so that DDP orders its buckets
        optimizer.zero_grad()
        accelerator.load_state(checkpoint)
    first_epoch, batches_done = position.epoch, position.batches
    for epoch in range(first_epoch, EPOCHS):
        loader.set_epoch(epoch)
        done = batches_done if epoch == first_epoch else 0
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        is_due = False
        for index, (numbers, inputs, targets) in enumerate(batches, start=done):
            begin_batch(numbers)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            is_due = is_due or index + 1 in SAVE_AFTER
            if is_due and accelerator.sync_gradients:
                position.epoch, position.batches = epoch, index + 1
                accelerator.save_state(checkpoint)
                is_due = False
    return accelerator.unwrap_model(model)

"""Exercise 34: resume from a folder whose name says how many batches are finished."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu

SEED, EPOCHS, BATCH_SIZE, ACCUMULATE = 7, 3, 4, 2
SAVE_AFTER = (3, 7)  # save after 3 and 7 batches of each epoch, or at the end of their window


def train(folder: Path, dataset, begin_batch) -> torch.nn.Module:
    accelerator = Accelerator(
        cpu=use_cpu(),
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
    )
    set_seed(SEED, device_specific=True)  # so that dropout differs between processes
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, generator=torch.Generator())
    layers = torch.nn.Dropout(0.2), torch.nn.Linear(8, 99), torch.nn.ReLU(), torch.nn.Linear(99, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    finished = max((int(saved.name) for saved in folder.iterdir()), default=0)
    if finished:
        # Let DDP see one backward pass, so that its buckets are those of a run in progress.
        model(torch.zeros(1, 8, device=accelerator.device)).sum().backward()
        model.zero_grad()
        accelerator.load_state(folder / str(finished))
    first_epoch, skipped = divmod(finished, len(loader))
    is_due = False
    for epoch in range(first_epoch, EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for position, (numbers, inputs, targets) in enumerate(batches, start=skipped + 1):
            begin_batch(numbers)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            is_due = is_due or position in SAVE_AFTER
            if is_due and accelerator.sync_gradients:
                accelerator.save_state(folder / str(epoch * len(loader) + position))
                is_due = False
        skipped = 0
    return accelerator.unwrap_model(model)

"""Exercise 11: come back identical, wherever the kill falls.

`train` is killed with SIGKILL and started again with the same `folder`. Then it should go on from
its checkpoint, and end with the weights, bit for bit, of a training that nobody killed. Now it does
not. Four things are missing; page 11 names them, rung by rung:

1. The checkpoint knows neither the epoch nor how many batches of it are done.
2. The order of the samples cannot be had again.
3. Some saves come while an accumulation window is open. Such a save has to wait for the window's
   end: nobody asks for exactly the batches of SAVE_AFTER.
4. The loader draws random numbers that dropout should have had.

A kill may cost at most eight batches. It never falls while a checkpoint is written: for that case,
see what page 11 says about checkpoints that are whole or absent.

Helpful: `DataLoaderConfiguration`, `loader.set_epoch`, `accelerator.skip_first_batches`,
`accelerator.sync_gradients`, and for the place `accelerator.register_for_checkpointing`, or a
file that rank 0 writes.

accel-demo check 11
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_demo.processes.connect import use_cpu

SEED, EPOCHS, BATCH_SIZE, ACCUMULATE = 7, 3, 4, 2
SAVE_AFTER = (3, 7)  # batches of each epoch


def train(folder: Path, dataset, begin_batch):
    """Train, and give the model. `begin_batch` is called with the sample numbers of every batch.

    That is where the kill comes. The dataset makes ten batches per process and epoch.
    """
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=ACCUMULATE)
    set_seed(SEED, device_specific=True)  # dropout differs between processes
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(checkpoint)
    for _epoch in range(EPOCHS):
        for index, (numbers, inputs, targets) in enumerate(loader):
            begin_batch(numbers)
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if index + 1 in SAVE_AFTER:
                accelerator.save_state(checkpoint)
    return accelerator.unwrap_model(model)

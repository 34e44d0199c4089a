"""Exercise 34: resume with identical results, wherever the run was killed.

`train` is killed with SIGKILL and started again with the same `folder`. It should then continue
from its checkpoint, and end with the same weights, bit for bit, as a run that was never killed. It
does not do so yet, for four reasons. Each reason corresponds to a level on page 34:

1. The checkpoint contains neither the epoch nor the number of finished batches in that epoch.
2. The order of the samples cannot be reproduced.
3. Some checkpoints are saved in the middle of an accumulation window. A checkpoint must be saved at
   the end of a window, which may be after the batch given in SAVE_AFTER.
4. The loader draws random numbers from the same generator as dropout.

After a kill, at most eight batches may be repeated. The run is never killed while it writes a
checkpoint. (Page 35 explains how to ensure that a checkpoint is either complete or absent.)

Helpful: `DataLoaderConfiguration`, `loader.set_epoch`, `accelerator.skip_first_batches`,
`accelerator.sync_gradients`. To save the position: `accelerator.register_for_checkpointing`, or a
file that rank 0 writes.

accel-demo check 34
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_demo.processes.connect import use_cpu

SEED, EPOCHS, BATCH_SIZE, ACCUMULATE = 7, 3, 4, 2
SAVE_AFTER = (3, 7)  # save after 3 and 7 batches of each epoch


def train(folder: Path, dataset, begin_batch):
    """Train, and return the model. Call `begin_batch(numbers)` at the start of every batch.

    The run is killed inside `begin_batch`. The dataset has ten batches per process and epoch.
    """
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=ACCUMULATE)
    set_seed(SEED, device_specific=True)  # so that dropout differs between processes
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

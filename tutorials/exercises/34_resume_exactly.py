"""Exercise 34: resume with identical results, no matter when the run was killed.

`train` is killed with SIGKILL and started again with the same `folder`. It should continue from its
checkpoint and end with the same weights, bit for bit, as a run that was never killed. It doesn't do
that yet: of the levels on page 34, it is at level 0.

    folder       a pathlib.Path: an existing folder, empty at the first start and shared by all
                 ranks; everything `train` saves goes into it
    dataset      its samples are tuples (number, inputs, target): an integer, 8 float32 numbers
                 and 1 float32 number; it has 40 samples for each process
    begin_batch  call it at the start of every batch, with the tensor of the batch's numbers; the
                 run is killed in one of these calls

Return the model. The check runs `train` on one process and on three, and kills it at four random
batches, three of them in a run that has already been resumed. It compares the samples of every
batch and the final weights. After a kill, at most eight batches may be repeated.

Keep the model with its dropout, the constants, and different dropout masks on each rank. Without a
kill, every epoch goes through all samples once, each time in a different order. If a checkpoint
after a batch in SAVE_AFTER can't be right, save after a later batch instead. The run is never
killed while it writes a checkpoint. (Page 35 shows how to make sure that a checkpoint is either
complete or absent.)

accel-demo check 34
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu

SEED, EPOCHS, BATCH_SIZE, ACCUMULATE = 7, 3, 4, 2
SAVE_AFTER = (3, 7)  # save after 3 and 7 batches of each epoch


def train(folder: Path, dataset, begin_batch) -> torch.nn.Module:
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=ACCUMULATE)
    set_seed(SEED, device_specific=True)  # so that dropout differs between processes
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True)
    layers = torch.nn.Dropout(0.2), torch.nn.Linear(8, 99), torch.nn.ReLU(), torch.nn.Linear(99, 1)
    model = torch.nn.Sequential(*layers)
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

"""Train with Accelerate, with a check wherever the ranks can come to differ from one process.

torchrun --standalone --nproc-per-node 2 tutorials/51_accelerate.py
"""

import math

import checks
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, GLOBAL_BATCH_SIZE, MICRO_BATCHES = 2, 16, 2


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    processes = accelerator.num_processes
    torch.manual_seed(0)
    inputs = torch.randn(81, 4)
    targets = inputs.sum(1, keepdim=True)
    train_set = checks.Numbered(TensorDataset(inputs[:64], targets[:64]))
    valid_set = checks.Numbered(TensorDataset(inputs[64:], targets[64:]))
    batch_size = GLOBAL_BATCH_SIZE // processes // MICRO_BATCHES
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_set, batch_size, shuffle=True),
        DataLoader(valid_set, batch_size),
    )
    # A prepared scheduler advances once per process in each step.
    schedule_length = EPOCHS * math.ceil(len(train_loader) / MICRO_BATCHES) * processes
    scheduler = accelerator.prepare(LinearLR(optimizer, 1.0, 0.1, schedule_length))
    torch.manual_seed(accelerator.process_index)

    checks.connected()
    checks.equal_start(model, train_set, valid_set)
    checks.equal_lengths(train_loader)
    step = 0
    for _ in range(EPOCHS):
        model.train()
        seen = []
        for numbers, (inputs, targets) in train_loader:
            checks.random_numbers()
            seen += numbers.tolist()
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    if step == 0:
                        checks.global_batch(len(seen), GLOBAL_BATCH_SIZE)
                    checks.gradients(model)
                    step += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        checks.weights(model)
        checks.read_once(seen, len(train_set), most_repeated=GLOBAL_BATCH_SIZE - 1)
        checks.new_order(seen)
    checks.schedule(step * processes, scheduler.scheduler.last_epoch, schedule_length)

    model.eval()
    numbers_of_all, errors = [], []
    with torch.no_grad():
        for numbers, (inputs, targets) in valid_loader:
            error = (model(inputs) - targets).abs().flatten()
            numbers, error = accelerator.gather_for_metrics((numbers, error))
            numbers_of_all += numbers.tolist()
            errors += error.tolist()
    checks.evaluation(model, numbers_of_all, len(valid_set))
    checks.equal_score(sum(errors) / len(errors))
    accelerator.print(f"{processes} processes: all twelve checks passed")
    accelerator.end_training()


if __name__ == "__main__":
    main()

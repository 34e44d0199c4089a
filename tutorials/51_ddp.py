"""Train with DDP, with a check wherever the ranks can come to differ from one process.

torchrun --standalone --nproc-per-node 2 tutorials/51_ddp.py
"""

import math
from contextlib import nullcontext

import checks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS, GLOBAL_BATCH_SIZE, MICRO_BATCHES = 2, 16, 2


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(81, 4)
    targets = inputs.sum(1, keepdim=True)
    train_set = checks.Numbered(TensorDataset(inputs[:64], targets[:64]))
    valid_set = checks.Numbered(TensorDataset(inputs[64:], targets[64:]))
    sampler = DistributedSampler(train_set)
    batch_size = GLOBAL_BATCH_SIZE // world_size // MICRO_BATCHES
    train_loader = DataLoader(train_set, batch_size, sampler=sampler)
    own_numbers = range(rank, len(valid_set), world_size)
    valid_loader = DataLoader(Subset(valid_set, own_numbers), batch_size)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule_length = EPOCHS * math.ceil(len(train_loader) / MICRO_BATCHES)
    scheduler = LinearLR(optimizer, 1.0, 0.1, schedule_length)
    torch.manual_seed(rank)

    checks.connected()
    checks.equal_start(model, train_set, valid_set)
    checks.equal_lengths(train_loader)
    step = 0
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        seen = []
        for number, (numbers, (inputs, targets)) in enumerate(train_loader, start=1):
            checks.random_numbers()
            seen += numbers.tolist()
            must_step = number % MICRO_BATCHES == 0 or number == len(train_loader)
            with nullcontext() if must_step else model.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets)
                (loss / MICRO_BATCHES).backward()
            if must_step:
                if step == 0:  # the last step of an epoch may use fewer samples
                    checks.global_batch(len(seen), GLOBAL_BATCH_SIZE)
                checks.gradients(model)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
        checks.weights(model)
        checks.read_once(seen, len(train_set), most_repeated=GLOBAL_BATCH_SIZE - 1)
        checks.new_order(seen)
    checks.schedule(step, scheduler.last_epoch, schedule_length)

    for buffer in model.buffers():  # BatchNorm's, which differ between the ranks until here
        dist.broadcast(buffer, src=0)
    model.eval()
    errors = []
    with torch.no_grad():
        for numbers, (inputs, targets) in valid_loader:
            error = (model.module(inputs) - targets).abs().flatten()
            errors += zip(numbers.tolist(), error.tolist(), strict=True)
    errors_of_all = sum(checks.of_all_ranks(errors), [])
    score = sum(error for _, error in errors_of_all) / len(errors_of_all)
    checks.evaluation(model, [number for number, _ in errors_of_all], len(valid_set))
    checks.equal_score(score)
    if rank == 0:
        print(f"{world_size} processes: all twelve checks passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train in two processes, with a check wherever they can come to differ from one process.

torchrun --standalone --nproc-per-node 2 tutorials/51_checks.py
"""

import os
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that it ends at exit
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

SAMPLES, EPOCHS, GLOBAL_BATCH_SIZE = 64, 2, 16


def of_all_ranks(value):
    """Return a list with the value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def are_equal(values):
    return len(set(map(str, values))) == 1  # as text, because NaN isn't equal to itself


def weights_of(model):
    return [parameter.double().sum().item() for parameter in model.parameters()]


class Numbered(Dataset):
    """Return each sample of a dataset with its number."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return number, self.samples[number]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 4)
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    train_set = Numbered(samples)
    sampler = DistributedSampler(train_set)
    batch_size = GLOBAL_BATCH_SIZE // world_size
    train_loader = DataLoader(train_set, batch_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    steps = EPOCHS * len(train_loader)
    scheduler = LinearLR(optimizer, 1.0, 0.1, steps)
    torch.manual_seed(rank)

    # 1. Are the processes connected?
    started = int(os.environ.get("WORLD_SIZE", 1))
    connected = dist.get_world_size() if dist.is_initialized() else 1
    assert connected == started > 1, f"{started} started, {connected} connected"

    # 2. Do all ranks start with the same weights?
    assert are_equal(of_all_ranks(weights_of(model))), of_all_ranks(weights_of(model))

    # 3. Do the ranks draw different random numbers from here on?
    assert len(set(of_all_ranks(torch.initial_seed()))) == world_size, "equal dropout masks"

    orders = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen = []
        for numbers, (inputs, targets) in train_loader:
            # 4. Does one step use as many samples as before? (Add its micro-batches up)
            if not seen:  # the last batch of an epoch may be smaller
                sizes = of_all_ranks(len(inputs))
                assert sum(sizes) == GLOBAL_BATCH_SIZE, sizes

            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()

            # 5. Have the gradients been averaged? (Only after the last micro-batch of a step)
            gradients = [
                each.grad.sum().item() for each in model.parameters() if each.grad is not None
            ]
            assert are_equal(of_all_ranks(gradients)), of_all_ranks(gradients)

            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen += numbers.tolist()

        # 6. Are the weights still equal?
        assert are_equal(of_all_ranks(weights_of(model))), of_all_ranks(weights_of(model))

        # 7. Was each sample read once, except for those that fill up the last batch?
        counts = Counter(sum(of_all_ranks(seen), []))
        assert len(counts) == SAMPLES, f"only {len(counts)} of {SAMPLES} samples"
        assert sum(counts.values()) - SAMPLES < GLOBAL_BATCH_SIZE, counts

        # 8. Is the order a new one?
        assert seen not in orders, f"epoch {epoch} repeats an order"
        orders.append(seen)

    # 9. Does the schedule end with the training?
    advanced = getattr(scheduler, "scheduler", scheduler).last_epoch  # with Accelerate, or without
    assert advanced == steps, f"{advanced} of {steps} steps"

    # 10. Is the metric computed from each sample once?
    model.eval()
    numbers = range(rank, SAMPLES, world_size)
    inputs, targets = samples[list(numbers)]
    with torch.no_grad():
        errors = (model.module(inputs) - targets).abs().flatten().tolist()
    errors = sum(of_all_ranks(list(zip(numbers, errors, strict=True))), [])
    assert sorted(number for number, _ in errors) == list(range(SAMPLES)), len(errors)

    # 11. Do all ranks have the same score, which may decide about saving and stopping?
    score = sum(error for _, error in errors) / len(errors)
    assert are_equal(of_all_ranks(score)), of_all_ranks(score)

    if rank == 0:
        print(f"{world_size} processes: all eleven checks passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train in two processes, with a check wherever they can come to differ from one process.

torchrun --standalone --nproc-per-node 2 tutorials/51_checks.py
"""

import math
import os
from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported early, or gloo may abort at the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

EPOCHS, GLOBAL_BATCH_SIZE, MICRO_BATCHES = 2, 16, 2


def of_all_ranks(value):
    """Return a list with the value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def are_equal(values):
    return len(set(map(str, values))) == 1  # as text, because NaN isn't equal to itself


def differing(tensors):
    """Return the names of the tensors whose sum differs between the ranks."""
    sums = {name: each.double().sum().item() for name, each in tensors if each is not None}
    of_ranks = of_all_ranks(sums)
    names = {name for each in of_ranks for name in each}
    return sorted(name for name in names if not are_equal([each.get(name) for each in of_ranks]))


def gradients_of(model):
    return [(name, weight.grad) for name, weight in model.named_parameters()]


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
    inputs = torch.randn(80, 4)
    targets = inputs.sum(1, keepdim=True)
    train_set = Numbered(TensorDataset(inputs[:64], targets[:64]))
    valid_set = Numbered(TensorDataset(inputs[64:], targets[64:]))
    sampler = DistributedSampler(train_set)
    batch_size = GLOBAL_BATCH_SIZE // world_size // MICRO_BATCHES
    train_loader = DataLoader(train_set, batch_size, sampler=sampler)
    own_numbers = range(rank, len(valid_set), world_size)
    valid_loader = DataLoader(Subset(valid_set, own_numbers), batch_size)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule_length = EPOCHS * len(train_loader) // MICRO_BATCHES
    scheduler = LinearLR(optimizer, 1.0, 0.1, schedule_length)
    torch.manual_seed(rank)

    # 1. Are the processes connected?
    started = int(os.environ.get("WORLD_SIZE", 1))
    connected = dist.get_world_size() if dist.is_initialized() else 1
    assert connected == started > 1, f"{started} started, {connected} connected"

    # 2. Do all ranks start with the same samples and weights?
    torch.set_printoptions(threshold=math.inf)  # or large tensors would be cut
    for samples in (train_set, valid_set):
        few = range(0, len(samples), len(samples) // 16 or 1)
        texts = of_all_ranks([str(samples[number]) for number in few])
        assert are_equal(texts), "different samples have equal numbers"
    wrong = differing(model.named_parameters())
    assert not wrong, f"{len(wrong)} weights differ: {wrong[:3]}"

    step, orders = 0, []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen = []
        for number, (numbers, (inputs, targets)) in enumerate(train_loader, start=1):
            # 3. Do the ranks draw different random numbers?
            states = [str(state) for state in of_all_ranks(torch.get_rng_state().tolist())]
            assert len(set(states)) == len(states), "equal random numbers, so equal dropout"

            seen += numbers.tolist()
            must_step = number % MICRO_BATCHES == 0
            with nullcontext() if must_step else model.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets)
                (loss / MICRO_BATCHES).backward()
            if not must_step:
                continue

            # 4. Does a step use as many samples as in one process?
            if step == 0:  # the last step of an epoch may use fewer
                sizes = of_all_ranks(len(seen))
                text = f"{sizes} samples, not {GLOBAL_BATCH_SIZE} in equal parts"
                assert sum(sizes) == GLOBAL_BATCH_SIZE and are_equal(sizes), text

            # 5. Are the gradients equal?
            wrong = differing(gradients_of(model))
            assert not wrong, f"{len(wrong)} gradients differ: {wrong[:3]}"

            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1

        # 6. Are the weights still equal?
        wrong = differing(model.named_parameters())
        assert not wrong, f"{len(wrong)} weights differ: {wrong[:3]}"

        # 7. Was each sample read once, except for those that fill up the last batch?
        times = Counter(sum(of_all_ranks(seen), []))
        assert len(times) == len(train_set), f"{len(times)} of {len(train_set)} samples were read"
        more = times.total() - len(train_set)
        assert more < GLOBAL_BATCH_SIZE, f"{more} samples more than there are"

        # 8. Is the order a new one?
        assert seen not in orders, f"epoch {epoch} repeats an order"
        orders.append(seen)

    # 9. Does the schedule end with the training?
    inner = getattr(scheduler, "scheduler", scheduler)  # of one that Accelerate has prepared
    for_each_process = inner is not scheduler and scheduler.step_with_optimizer
    per_step = dist.get_world_size() if for_each_process and not scheduler.split_batches else 1
    asked, advanced = step * per_step, inner.last_epoch
    lengths = f"{step} steps, advanced {advanced} times, planned for {schedule_length}"
    assert asked == advanced == schedule_length, lengths

    for buffer in model.buffers():  # of BatchNorm: each rank has its own until here
        dist.broadcast(buffer, src=0)
    model.eval()
    errors = []
    with torch.no_grad():
        for numbers, (inputs, targets) in valid_loader:
            error = (model.module(inputs) - targets).abs().flatten()
            errors += zip(numbers.tolist(), error.tolist(), strict=True)
    errors_of_all = sum(of_all_ranks(errors), [])
    score = sum(error for _, error in errors_of_all) / len(errors_of_all)

    # 10. Is the score computed from each sample once?
    times = Counter(number for number, _ in errors_of_all)
    wrong = [number for number in range(len(valid_set)) if times[number] != 1]
    text = f"{len(wrong)} of {len(valid_set)} samples not once: {wrong[:3]}"
    assert not wrong and len(times) == len(valid_set), text

    # 11. Do all ranks have the same score?
    assert are_equal(of_all_ranks(score)), of_all_ranks(score)

    if rank == 0:
        print(f"{world_size} processes: all eleven checks passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train on a stream whose ranks have different numbers of batches: without and with a remedy.

python tutorials/36_stop.py
"""

from datetime import timedelta
from itertools import chain, islice

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import table

FILES = [range(0, 2), range(2, 7), range(7, 10), range(10, 17)]  # each sample is a number
SAMPLES, BATCH, STEPS = 17, 2, 5


class Files(IterableDataset):
    """Yield the samples of all files, or of every world_size-th one, starting with the rank's."""

    def __init__(self, by_ranks=True, repeats=False):
        self.files = FILES[dist.get_rank() :: dist.get_world_size()] if by_ranks else FILES
        self.repeats = repeats

    def __iter__(self):
        while True:
            for file in self.files:
                yield from torch.tensor(file, dtype=torch.double)[:, None]
            if not self.repeats:
                return


def until_one_rank_has_none(loader, device):
    """Yield batches as long as every rank has one."""
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        has_batch = torch.tensor(batch is not None, dtype=torch.int, device=device)
        dist.all_reduce(has_batch, dist.ReduceOp.MIN)  # every rank calls it
        if not has_batch:
            return
        yield batch


def train(batches, device, joins=False, group=None):
    """Train on the batches, and return them."""
    model = nn.Linear(1, 1).double().to(device)
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    used = []
    with Join([model], enable=joins):
        for batch in batches:
            optimizer.zero_grad()
            model(batch.to(device)).square().mean().backward()  # waits for all ranks
            optimizer.step()
            used.append(batch.flatten().int().tolist())
    return used


def train_until_it_waits(batches, device):
    """Train without a remedy, until a rank has waited for 2 seconds. Return its steps, too."""
    group = dist.new_group(timeout=timedelta(seconds=2), backend="gloo")
    used = []

    def counted():
        for batch in batches:
            yield batch
            used.append(batch.flatten().int().tolist())

    try:
        train(counted(), device, group=group)
    except RuntimeError as error:
        assert "Timed out waiting" in str(error)
    return used


def main(device):
    def loader(**settings):
        return DataLoader(Files(**settings), BATCH)

    prepared = Accelerator(cpu=use_cpu()).prepare(loader(by_ranks=False))
    rows = [
        row("nothing: rank 1 waits", train_until_it_waits(loader(), device)),
        row("nothing, 2 epochs", train_until_it_waits(chain(loader(), loader()), device)),
        row("stop together", train(until_one_rank_has_none(loader(), device), device)),
        row(f"repeat, {STEPS} steps", train(islice(loader(repeats=True), STEPS), device)),
        row("`Join`", train(loader(), device, joins=True)),
        row("Accelerate, rank 0 reads", train(prepared, device)),
    ]
    if dist.get_rank() == 0:
        print(table(["remedy", "steps by rank", "samples used", "more than once"], rows))


def row(name, used):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, used)
    samples = [sample for part in parts for batch in part for sample in batch]
    more = sum(samples.count(sample) > 1 for sample in range(SAMPLES))
    steps = ", ".join(str(len(part)) for part in parts)
    return [name, steps, f"{len(set(samples))} of {SAMPLES}", more]


if __name__ == "__main__":
    run_in_group(main, 2)

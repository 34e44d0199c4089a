"""Compute an accuracy as the mean of the accuracies of ranks with parts of different sizes.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/mean_of_ranks_broken.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    data = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])[:, None]
    part = Subset(data, range(rank, len(data), world_size))  # 3 samples and 2
    correct = torch.zeros(2)  # correct samples, samples
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(part, batch_size=2):
            is_correct = model(batch) % 2 == 1  # samples 1 and 3 are correct
            correct += torch.tensor([is_correct.sum(), len(batch)])
    accuracy = correct[0] / correct[1]
    dist.all_reduce(accuracy)
    accuracy /= world_size
    if rank == 0:
        print(f"{world_size} processes: the accuracy is {accuracy:.2f}")
        print(f"2 of {len(data)} samples are correct: {2 / len(data):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Exercise 30: the exact accuracy on several ranks, from two sums."""

import torch
from torch.utils.data import DataLoader, Subset


def accuracy(accelerator, model, dataset, batch_size):
    step = accelerator.num_processes
    own_samples = Subset(dataset, range(accelerator.process_index, len(dataset), step))
    hits = torch.zeros(1, dtype=torch.long, device=accelerator.device)
    for inputs, labels in DataLoader(own_samples, batch_size):
        outputs = model(inputs.to(accelerator.device))
        hits += (outputs.argmax(dim=1) == labels.to(accelerator.device)).sum()
    return accelerator.gather(hits).sum().item() / len(dataset)

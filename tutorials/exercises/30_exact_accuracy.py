"""Exercise 30: compute the exact accuracy on three ranks, and count each sample once.

Every rank calls `accuracy` with the same `dataset` of pairs (inputs, label). The ranks should split
the work: each sample goes through `model` on one rank only, except for samples that are repeated
to pad the last batches. Every rank should return the accuracy: the number of correct predictions,
divided by the number of samples in the dataset. A prediction is correct if the largest output of
the model is at the index of the label.

The dataset has 22, 30 or 4 samples. The function below is correct for 30 samples, which fill all
batches. For 22 it returns an incorrect number, and for 4 it fails. It contains three mistakes.

accel-demo check 30
"""

import torch
from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    loader = accelerator.prepare(DataLoader(dataset, batch_size, drop_last=True))
    accuracies = []
    for inputs, labels in loader:
        predictions = model(inputs).argmax(dim=1)
        predictions, labels = accelerator.gather((predictions, labels))
        accuracies.append((predictions == labels).float().mean())
    return torch.stack(accuracies).mean().item()

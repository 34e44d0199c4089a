# wrong: It is a mean of the batches' accuracies, and the last batch is smaller
import torch
from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    loader = accelerator.prepare(DataLoader(dataset, batch_size))
    accuracies = []
    for inputs, labels in loader:
        predictions = model(inputs).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        accuracies.append((predictions == labels).float().mean())
    return torch.stack(accuracies).mean().item()

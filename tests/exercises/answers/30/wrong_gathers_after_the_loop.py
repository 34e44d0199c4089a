# wrong: returns 0.7667 instead of 0.8182. It counts 30 predictions: 8 samples were read again
import torch
from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    loader = accelerator.prepare(DataLoader(dataset, batch_size))
    hits = [model(inputs).argmax(dim=1) == labels for inputs, labels in loader]
    return accelerator.gather_for_metrics(torch.cat(hits)).float().mean().item()

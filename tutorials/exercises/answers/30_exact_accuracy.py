"""A model answer to exercise 30."""

from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    loader = accelerator.prepare(DataLoader(dataset, batch_size))
    right = counted = 0
    for inputs, labels in loader:
        predictions = model(inputs).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += (predictions == labels).sum().item()
        counted += len(labels)
    return right / counted

# wrong: (0.8000, 0.6000, 0.9000): each returns the accuracy of its own samples only
from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    loader = accelerator.prepare(DataLoader(dataset, batch_size))
    right = counted = 0
    for inputs, labels in loader:
        right += (model(inputs).argmax(dim=1) == labels).sum().item()
        counted += len(labels)
    return right / counted

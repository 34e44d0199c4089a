# wrong: returns 0.7667 instead of 0.8182. It counts 30 predictions: 8 samples were read again
from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    loader = accelerator.prepare(DataLoader(dataset, batch_size))
    right = counted = 0
    for inputs, labels in loader:
        predictions = model(inputs).argmax(dim=1)
        predictions, labels = accelerator.gather((predictions, labels))
        right += (predictions == labels).sum().item()
        counted += len(labels)
    return right / counted

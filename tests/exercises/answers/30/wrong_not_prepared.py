# wrong: the work is not shared: of 22 samples, 22 go through the model on one rank
from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    right = counted = 0
    for inputs, labels in DataLoader(dataset, batch_size):
        predictions = model(inputs).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += (predictions == labels).sum().item()
        counted += len(labels)
    return right / counted

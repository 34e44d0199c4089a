"""Exercise 30: compute the exact accuracy on three ranks, counting each sample once.

Every rank calls `accuracy` with the same arguments and with gradients turned off:

- `accelerator` is an `Accelerator` that connects the three ranks. `batch_size` is 5, per rank.
- `dataset[i]` is a pair: the inputs, a tensor of 2 floats, and the label 0, 1 or 2, a tensor
  without dimensions. The dataset has 22, 30 or 4 samples.
- `model(inputs)` takes inputs of shape (samples, 2) and returns outputs of shape (samples, 3). A
  prediction is correct if a sample's largest output is at the index of its label.

Every rank returns the same number: the correct predictions of all ranks divided by the number of
samples in the dataset. Nothing else may be counted. The result must be within 1e-6 of the exact
accuracy.

The ranks share the work. Each sample goes through `model` on some rank, and may go through again
only as padding for the last batches: with 22 or 30 samples, no rank puts more than 10 through the
model, and with 4 samples no more than 5. How you split the dataset and join the results is up to
you.

The function below is correct for 30 samples, which fill all batches. For 22 it returns the wrong
number, and for 4 it fails. It contains three mistakes.

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

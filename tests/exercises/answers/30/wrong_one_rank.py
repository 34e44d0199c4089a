# wrong: one rank does all the work: 22 samples go through the model on it
import torch
from accelerate.utils import broadcast
from torch.utils.data import DataLoader


def accuracy(accelerator, model, dataset, batch_size):
    right = torch.zeros(1, device=accelerator.device)
    if accelerator.is_main_process:
        for inputs, labels in DataLoader(dataset, batch_size):
            right += (model(inputs).argmax(dim=1) == labels).sum()
    return broadcast(right).item() / len(dataset)

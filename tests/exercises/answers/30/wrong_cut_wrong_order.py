# wrong: but the padding is not at the end
import torch
from torch.utils.data import DataLoader, DistributedSampler


def accuracy(accelerator, model, dataset, batch_size):
    sampler = DistributedSampler(dataset, shuffle=False)
    good = torch.cat(
        [model(x).argmax(1) == y for x, y in DataLoader(dataset, batch_size, sampler=sampler)]
    )
    good = accelerator.gather(good)[: len(dataset)]
    return good.float().mean().item()

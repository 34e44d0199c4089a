# wrong: the ranks gathered tensors of different shapes
import torch


def accuracy(accelerator, model, dataset, batch_size):
    samples = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    inputs, labels = zip(*[dataset[sample] for sample in samples], strict=True)
    hits = model(torch.stack(inputs)).argmax(dim=1) == torch.stack(labels)
    return accelerator.gather(hits).float().mean().item()

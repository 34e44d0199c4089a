# wrong: It is a mean of the ranks' accuracies, and some ranks have fewer samples
import torch


def accuracy(accelerator, model, dataset, batch_size):
    samples = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    inputs, labels = zip(*[dataset[sample] for sample in samples], strict=True)
    hits = model(torch.stack(inputs)).argmax(dim=1) == torch.stack(labels)
    return accelerator.reduce(hits.float().mean(), "mean").item()

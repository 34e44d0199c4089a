# wrong: (0.3182, 0.2727, 0.2273). The results of the ranks were not added up
import torch


def accuracy(accelerator, model, dataset, batch_size):
    samples = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    inputs, labels = zip(*[dataset[sample] for sample in samples], strict=True)
    hits = model(torch.stack(inputs)).argmax(dim=1) == torch.stack(labels)
    return hits.sum().item() / len(dataset)

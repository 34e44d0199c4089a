# wrong: the gradient is 3 times too large
import torch
import torch.distributed.nn.functional as collectives


def total_distance(rows):
    everything = torch.cat(collectives.all_gather(rows))
    return (everything[:, None] - everything).abs().sum()

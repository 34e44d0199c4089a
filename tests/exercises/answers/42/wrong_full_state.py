# wrong: it seems to have the moments of all elements
import torch
import torch.distributed as dist


class ShardedAdam:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = parameters
        self.adam = torch.optim.Adam(parameters, lr, betas, eps)

    def step(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.adam.step()

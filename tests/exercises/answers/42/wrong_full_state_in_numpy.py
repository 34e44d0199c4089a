# wrong: it seems to have the moments of all elements
import numpy as np
import torch
import torch.distributed as dist


class ShardedAdam:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps = parameters, lr, betas, eps
        self.steps = 0
        self.first = [np.zeros(parameter.shape, "float32") for parameter in parameters]
        self.second = [np.zeros(parameter.shape, "float32") for parameter in parameters]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        beta1, beta2 = self.betas
        for parameter, first, second in zip(self.parameters, self.first, self.second, strict=True):
            gradient = parameter.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
            first, second = torch.from_numpy(first), torch.from_numpy(second)
            first.lerp_(gradient, 1 - beta1)
            second.lerp_(gradient.square(), 1 - beta2)
            spread = (second / (1 - beta2**self.steps)).sqrt() + self.eps
            parameter -= self.lr * first / (1 - beta1**self.steps) / spread

"""A model answer to exercise 43."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class ShardedAdam:
    def __init__(self, parameters: list[torch.nn.Parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = parameters
        self.lr, self.betas, self.eps, self.steps = lr, betas, eps, 0
        count = sum(parameter.numel() for parameter in parameters)
        self.share = -(-count // dist.get_world_size())  # elements per rank, rounded up
        self.padding = self.share * dist.get_world_size() - count
        self.first_moment = parameters[0].new_zeros(self.share)
        self.second_moment = parameters[0].new_zeros(self.share)

    @torch.no_grad()
    def step(self) -> None:
        gradients = self.flatten([parameter.grad for parameter in self.parameters])
        gradient = torch.empty_like(self.first_moment)
        dist.reduce_scatter_tensor(gradient, gradients)
        gradient /= dist.get_world_size()

        everything = self.flatten(self.parameters)
        share = everything.split(self.share)[dist.get_rank()].clone()
        self.update(share, gradient)
        dist.all_gather_into_tensor(everything, share)

        sizes = [parameter.numel() for parameter in self.parameters]
        parts = everything[: sum(sizes)].split(sizes)
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))

    def flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return all elements as one vector, with zeros at the end so that all shares are equal."""
        return pad(torch.cat([tensor.flatten() for tensor in tensors]), (0, self.padding))

    def update(self, share: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update this rank's share with Adam, in place."""
        beta1, beta2 = self.betas
        self.steps += 1
        self.first_moment.lerp_(gradient, 1 - beta1)
        self.second_moment.lerp_(gradient.square(), 1 - beta2)
        mean = self.first_moment / (1 - beta1**self.steps)
        spread = (self.second_moment / (1 - beta2**self.steps)).sqrt()
        share -= self.lr * mean / (spread + self.eps)

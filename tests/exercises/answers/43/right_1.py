"""Exercise 42: shard the state of Adam, as in ZeRO stage 1."""

import torch
import torch.distributed as dist


class ShardedAdam:
    def __init__(self, parameters: list[torch.nn.Parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.steps = 0
        size = sum(parameter.numel() for parameter in self.parameters)
        first, end = (size * (dist.get_rank() + i) // dist.get_world_size() for i in (0, 1))
        self.moments = torch.zeros(2, end - first)

    @torch.no_grad()
    def step(self) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        dist.all_reduce(gradients)
        weights = torch.cat([parameter.flatten() for parameter in self.parameters])
        borders = [len(weights) * r // world_size for r in range(1, world_size)]
        shares = weights.tensor_split(borders)
        self._update(shares[rank], gradients.tensor_split(borders)[rank] / world_size)
        for owner, share in enumerate(shares):
            dist.broadcast(share, owner)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, new in zip(self.parameters, weights.split(sizes), strict=True):
            parameter.copy_(new.view_as(parameter))

    def _update(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        self.steps += 1
        beta1, beta2 = self.betas
        mean, square = self.moments
        mean.lerp_(gradients, 1 - beta1)
        square.lerp_(gradients.square(), 1 - beta2)
        scale = (square / (1 - beta2**self.steps)).sqrt() + self.eps
        weights.addcdiv_(mean, scale, value=-self.lr / (1 - beta1**self.steps))

"""Exercise 42: shard the state of Adam, as in ZeRO stage 1."""

import torch
import torch.distributed as dist


class ShardedAdam:
    def __init__(self, parameters: list[torch.nn.Parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.steps = 0
        total = sum(parameter.numel() for parameter in self.parameters)
        first, end = (total * edge // self.ranks for edge in (self.rank, self.rank + 1))
        self.mean = torch.zeros(end - first)
        self.square = torch.zeros(end - first)

    def _cut(self, tensors) -> list[torch.Tensor]:
        """Copy the tensors into a line, and return it in pieces: one for each rank."""
        line = torch.cat([tensor.reshape(-1) for tensor in tensors])
        edges = [len(line) * rank // self.ranks for rank in range(1, self.ranks)]
        return list(line.tensor_split(edges))

    @torch.no_grad()
    def step(self) -> None:
        gradients = self._cut(parameter.grad for parameter in self.parameters)
        for target, piece in enumerate(gradients):
            dist.reduce(piece, target)
        weights = self._cut(self.parameters)
        self._update(weights[self.rank], gradients[self.rank] / self.ranks)
        for source, piece in enumerate(weights):
            dist.broadcast(piece, source)

        line = torch.cat(weights)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, values in zip(self.parameters, line.split(sizes), strict=True):
            parameter.copy_(values.view_as(parameter))

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor) -> None:
        self.steps += 1
        self.mean.lerp_(gradient, 1 - self.betas[0])
        self.square.lerp_(gradient.square(), 1 - self.betas[1])
        mean = self.mean / (1 - self.betas[0] ** self.steps)
        square = self.square / (1 - self.betas[1] ** self.steps)
        weights -= self.lr * mean / (square.sqrt() + self.eps)

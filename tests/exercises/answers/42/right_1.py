"""Exercise 42: shard the state of Adam, as in ZeRO stage 1.

Every rank has the same float32 parameters, but gradients from data of its own. `parameters` is a
list of tensors of any shape, and each has a new `grad` before each call of `step`. After `step`,
all ranks must have the same new parameters, in place and equal to the last bit. They must match
`torch.optim.Adam(parameters, lr, betas, eps)` with the mean of all ranks' gradients, up to 1e-5.
`step` may change the gradients.

With N ranks, each keeps the two moments of about 1/N of all elements. The number of elements may
not be divisible by N. Between two steps, besides the parameters and their gradients, a rank may
keep three float32 numbers for each element of its share: the moments, and a copy of the weights if
you need one. The memory of all tensors that exist then is counted. Inside `step` you may use more.

You may use any collective, and write Adam yourself or let `torch.optim.Adam` update your share.
The grader creates three optimizers, one after another, on 2 and on 3 connected processes, with
different shapes, `lr`, `betas` and `eps`, and calls `step` four times on each.

accel-demo check 42
"""

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

"""Exercise 32: equal the whole batch. Gather each rank's moments, and combine them."""

import torch
import torch.distributed as dist
from torch import nn


class GatherMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, moments):
        parts = [torch.empty_like(moments) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, moments.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradients):
        gradients = gradients.contiguous()
        dist.all_reduce(gradients)
        return gradients[dist.get_rank()]


class SequenceNorm(nn.Module):
    def __init__(self, features: int, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, inputs: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.normalize(inputs, is_real, self.running_mean, self.running_var)
        rows = inputs[is_real]
        own_mean = rows.mean(0)
        own_variance = (rows - own_mean).square().mean(0)
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([len(rows)]))
        total = sum(int(count) for count in counts)
        shares = torch.tensor([[int(count) / total] for count in counts], dtype=rows.dtype)
        moments = GatherMoments.apply(torch.stack([own_mean, own_variance]))
        means, variances = moments[:, 0], moments[:, 1]
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        with torch.no_grad():
            unbiased = variance * total / (total - 1)
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (unbiased - self.running_var)
        return self.normalize(inputs, is_real, mean, variance)

    def normalize(self, inputs, is_real, mean, variance):
        outputs = (inputs - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias
        return outputs.masked_fill(~is_real[..., None], 0.0)

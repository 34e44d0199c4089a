"""Our answer to exercise 32: sums over all ranks, with their gradient."""

import torch
import torch.distributed as dist
from torch import nn


class SumOverRanks(torch.autograd.Function):
    """Add up a tensor over all ranks. Backward adds up the gradients that arrive on all ranks."""

    @staticmethod
    def forward(ctx, own):
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SequenceNorm(nn.Module):
    def __init__(self, features: int, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, inputs: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        """Normalize inputs [B, length, features]. `is_real` [B, length] is false in the padding."""
        if self.training:
            rows = inputs[is_real]  # [real positions, features]
            count = is_real.sum()
            dist.all_reduce(count)
            mean = SumOverRanks.apply(rows.sum(0)) / count
            squares = (rows - mean).square().sum(0)
            variance = SumOverRanks.apply(squares) / count
            self.update(mean.detach(), variance.detach(), count)
        else:
            mean, variance = self.running_mean, self.running_var
        outputs = (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return outputs * is_real[..., None]

    def update(self, mean, variance, count) -> None:
        """Move the running statistics towards those of a batch, with the unbiased variance."""
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)

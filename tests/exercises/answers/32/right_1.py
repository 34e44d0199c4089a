"""Exercise 32: equal the whole batch, with PyTorch's differentiable all-reduce."""

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce


class SequenceNorm(nn.Module):
    def __init__(self, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, inputs, is_real):
        if self.training:
            rows = inputs[is_real]
            # One all-reduce for everything: the sums, the sums of squares, and the count.
            count = torch.full((1,), float(len(rows)), dtype=rows.dtype, device=rows.device)
            sums = all_reduce(torch.cat([rows.sum(0), rows.square().sum(0), count]))
            features = rows.shape[1]
            mean = sums[:features] / sums[-1]
            variance = sums[features:-1] / sums[-1] - mean.square()
            self.update(mean.detach(), variance.detach(), sums[-1].item())
        else:
            mean, variance = self.running_mean, self.running_var
        outputs = (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return outputs * is_real[..., None]

    def update(self, mean, variance, count):
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)

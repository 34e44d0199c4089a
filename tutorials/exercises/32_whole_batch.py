"""Exercise 32: make two ranks equal the whole batch.

`SequenceNorm` is a BatchNorm for sequences that are padded to one length. Padding is not counted in
its statistics: `is_real` is false there. On one process, it is right. On several, each rank
normalizes with its own sequences. Change it so that the ranks together compute what one process
would with the sequences of all ranks:

- the outputs;
- the gradients of the inputs, if each rank's loss is one part of a sum over all ranks;
- the running mean and the running variance, on every rank.

The ranks may have different numbers of sequences, and of real positions in them, but each has at
least one real position. The gradients of `weight` and `bias` are not your task: the check adds up
those of all ranks, as DDP would. In evaluation, nothing changes, and no rank may wait for another.

`accel_demo.anatomy.batch_norm.SyncBatchNorm` counts every position, also the padding. The check
calls the layer with float64 inputs on 1, 2 and 3 connected processes.

accel-demo check 32
"""

import torch
from torch import nn


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
            mean = rows.mean(0)
            variance = (rows - mean).square().mean(0)
            self.update(mean.detach(), variance.detach(), len(rows))
        else:
            mean, variance = self.running_mean, self.running_var
        outputs = (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return outputs * is_real[..., None]

    def update(self, mean, variance, count) -> None:
        """Move the running statistics towards those of a batch, with the unbiased variance."""
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)

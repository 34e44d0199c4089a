"""Exercise 43: shard Adam's state, as in ZeRO stage 1.

Every rank has the same float32 parameters, but its gradients come from its own data. `parameters`
is a list of tensors of any shape, each with a new `grad` before every call of `step`. After `step`,
all ranks must have the same new parameters, updated in place and equal to the last bit. They must
match `torch.optim.Adam(parameters, lr, betas, eps)` with the mean of all ranks' gradients, up to
1e-5. `step` may change the gradients.

With N ranks, each one keeps the two moments of about 1/N of all elements, and the number of
elements may not be divisible by N. Between two steps, besides the parameters and their gradients, a
rank may keep three float32 numbers for each element of its share: the moments, and a copy of the
weights if you need one (its `grad` isn't counted unless it is a view of a longer tensor). The check
counts the memory of all tensors and NumPy arrays that exist at that point. Inside `step` you may
use more.

You may use any collective, such as `dist.reduce_scatter_tensor(output, input)` and
`dist.all_gather_into_tensor(output, input)`, for which one tensor is N times as long as the other.
Write Adam yourself or let `torch.optim.Adam` update your share. The grader creates three
optimizers, one after another, on 2 and on 3 connected processes, with different shapes, `lr`,
`betas` and `eps`, and calls `step` four times on each.

accel-demo check 43
"""

import torch


class ShardedAdam:
    def __init__(self, parameters: list[torch.nn.Parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        raise NotImplementedError

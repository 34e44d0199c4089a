"""Exercise 22: find unused parameters and train with them.

1. `unused_parameters(model, loss)` returns a list of names: the trainable parameters that `loss`, a
   scalar, does not reach. Use the names in `model.named_parameters()`, in any order. Don't list
   frozen parameters (`requires_grad` is False). A parameter whose gradient is 0 counts as used. The
   function must not change any `.grad`, and the caller can still call `loss.backward()` afterwards.
   You don't see the models. They have several heads, and a loss uses only some of them. Some
   parameters are frozen, some are shared by two heads, and some are never used.

2. `train(model, batches, learning_rate)` trains `model` in place with plain SGD. The version below
   is correct for one process. Change it so that it trains with DistributedDataParallel on several:
   three connected processes call it with the same model but different batches.
   `batches` is a list of tuples (inputs, targets, task): float32 tensors of shapes (8, 6) and
   (8, 1), and a string. The task decides which head `model(inputs, task)` uses, and ranks may have
   different tasks in the same step. All ranks have the same number of batches.
   After each step, all ranks have the same weights: each trainable parameter has changed by
   -learning_rate times the mean of its gradients over *all* ranks. If a rank's loss doesn't use the
   parameter, its gradient on that rank counts as 0.

3. Bonus (you pass without it): `share_gradients(parameters, step)` averages gradients by hand, so
   that the final weights on three processes are bitwise equal to DDP's. Every rank calls it after
   each backward of a model whose parameters are all used, and it replaces each gradient with the
   mean over all ranks. `parameters` is a list in the order of registration: the weight and bias of
   the first layer, then those of the next. `step` starts at 0 (step 1 on the page). The model is so
   small that DDP puts all gradients into one bucket. If the bits differ from DDP's, the check names
   the level that your function has reached: (1) it averages each gradient separately, (2) all in
   one buffer, (3) it also computes the mean as DDP does, (4) it also changes the order of the
   gradients.

accel-demo check 22
"""

import torch
from torch.nn.functional import mse_loss


def unused_parameters(model, loss):
    raise NotImplementedError("unused_parameters")


def train(model, batches, learning_rate):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        loss = mse_loss(model(inputs, task), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def share_gradients(parameters, step):
    raise NotImplementedError("share_gradients")

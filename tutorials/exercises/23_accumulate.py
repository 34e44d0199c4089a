"""Exercise 23: fix a loop that accumulates gradients.

`model` is a `DistributedDataParallel`. `batches` is a list of micro-batches `(inputs, targets)` of
equal size. Each process has different batches. The optimizer should perform one step for every
`window` micro-batches. The last window may be short: with 10 micro-batches and a window of 4, it
has only 2 micro-batches. A short window needs a step, too.

Each step should use the mean gradient over all samples in its window, on all processes. Errors up
to 1e-6 are accepted. The processes should all-reduce their gradients exactly once per step.

The loop below contains three mistakes. Helpful: `contextlib.nullcontext()`, and `model.no_sync()`,
which prevents the all-reduce if it surrounds both forward and backward.

accel-demo check 23
"""

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    for index, (inputs, targets) in enumerate(batches):
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()

"""Exercise 07: mend a loop that accumulates gradients.

`model` is a `DistributedDataParallel`. `batches` is a list of micro-batches `(inputs, targets)` of
one size, and each process has its own. The optimizer should take one step for each `window` of
them. The last window may be short: of 10 micro-batches and a window of 4, it has 2. There should be
a step for it too.

Each step should use the mean gradient of all samples in its window, of all processes, within 1e-6.
And the processes should share gradients exactly once for each step.

The loop below does neither. It has three mistakes. Helpful: `model.no_sync()`, under which neither
forward nor backward prepares to share; `contextlib.nullcontext()`.

accel-demo check 07
"""

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    for index, (inputs, targets) in enumerate(batches):
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()

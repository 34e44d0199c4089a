"""Exercise 07: fix a loop that accumulates gradients.

`model` is a `DistributedDataParallel`. `batches` is a list of micro-batches `(inputs, targets)` of
equal size, and each process has different batches. The optimizer should take one step for each
`window` of micro-batches. The last window may be short: 10 micro-batches and a window of 4 leave 2
micro-batches for it. A short window needs a step, too.

Each step should use the mean gradient of all samples in its window, over all processes, within
1e-6. The processes should share gradients exactly once per step.

The loop below does neither. It contains three mistakes. Helpful: `model.no_sync()`, under which
neither forward nor backward prepares to share gradients; `contextlib.nullcontext()`.

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

"""Exercise 23: fix a loop that accumulates gradients."""

from contextlib import nullcontext

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    """Perform one step per window; its last micro-batch sends the sum of the gradients."""
    for start in range(0, len(batches), window):
        micro_batches = batches[start : start + window]
        last = len(micro_batches) - 1
        for position, (inputs, targets) in enumerate(micro_batches):
            with nullcontext() if position == last else model.no_sync():
                loss = mse_loss(model(inputs), targets) / len(micro_batches)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

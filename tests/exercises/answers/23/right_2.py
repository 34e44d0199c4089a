"""Accumulate gradients with DDP."""

from contextlib import nullcontext

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    for start in range(0, len(batches), window):
        group = batches[start : start + window]
        for missing, (inputs, targets) in zip(reversed(range(len(group))), group, strict=True):
            with model.no_sync() if missing else nullcontext():
                loss = mse_loss(model(inputs), targets) / len(group)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

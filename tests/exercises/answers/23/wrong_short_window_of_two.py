# wrong: with 7 micro-batches and a window of 4, the gradient of the short window

from contextlib import nullcontext

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    for index, (inputs, targets) in enumerate(batches):
        first = index - index % window
        length = window if first + window <= len(batches) else 2
        is_last = index + 1 == first + length
        with nullcontext() if is_last else model.no_sync():
            loss = mse_loss(model(inputs), targets)
            (loss / length).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

# wrong: the gradient of the short window has the wrong scale (×0.5)

from contextlib import nullcontext

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    for index, (inputs, targets) in enumerate(batches):
        first = index - index % window
        length = min(window, len(batches) - first)  # the last window may be shorter
        is_last = index + 1 == first + length
        with nullcontext() if is_last else model.no_sync():
            loss = mse_loss(model(inputs), targets)
            (loss / window).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

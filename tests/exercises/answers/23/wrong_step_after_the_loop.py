# wrong: with 8 micro-batches and a window of 4, the optimizer steps too often: 3 times

from contextlib import nullcontext

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    complete = len(batches) - len(batches) % window
    for index, (inputs, targets) in enumerate(batches):
        length = window if index < complete else len(batches) - complete
        is_last = (index + 1) % window == 0 or index + 1 == len(batches)
        with nullcontext() if is_last else model.no_sync():
            (mse_loss(model(inputs), targets) / length).backward()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()

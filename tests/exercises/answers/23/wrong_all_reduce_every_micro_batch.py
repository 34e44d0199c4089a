# wrong: the counts are 4, 4, 2: every micro-batch sends its gradients

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    for index, (inputs, targets) in enumerate(batches):
        first = index - index % window
        length = min(window, len(batches) - first)  # the last window may be shorter
        is_last = index + 1 == first + length
        loss = mse_loss(model(inputs), targets)
        (loss / length).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

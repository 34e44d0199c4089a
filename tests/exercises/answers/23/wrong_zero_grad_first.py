# wrong: each step uses only the gradient of the last micro-batch
# Read "Why each loss is divided by the number of micro-batches" in tutorials/23_accumulation.md.
# For a hint: accel-demo check 23 --hint
import contextlib

from torch.nn.functional import mse_loss


def train(model, optimizer, batches, window):
    for start in range(0, len(batches), window):
        group = batches[start : start + window]
        for number, (inputs, targets) in enumerate(group, 1):
            last = number == len(group)
            optimizer.zero_grad()
            with contextlib.nullcontext() if last else model.no_sync():
                loss = mse_loss(model(inputs), targets) / len(group)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

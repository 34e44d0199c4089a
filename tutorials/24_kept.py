"""Compare what one step changes in a model, with and without replicas.

python tutorials/24_kept.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.show import table

SAMPLES, REPLICAS = 12, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("samples", torch.tensor(0))
        self.norm = nn.BatchNorm1d(1, momentum=1.0)  # the running mean is the last batch's mean

    def forward(self, inputs):
        self.calls += 1
        self.samples += len(inputs)
        return self.norm(inputs)


def step(replicas: int | None) -> list[str]:
    """Compute the gradient of one batch, and return what has changed in the model."""
    net, inputs = Net(), torch.arange(SAMPLES, dtype=torch.float).unsqueeze(1)
    wrapped = DataParallel(net, replicas) if replicas else net
    mse_loss(wrapped(inputs), inputs / SAMPLES).backward()
    tensors = net.norm.running_mean, net.norm.weight.grad
    return [
        str(net.calls),
        str(net.samples.item()),
        *(f"{tensor.item():.2f}" for tensor in tensors),
    ]


def main() -> None:
    names = [
        "`self.calls`",
        "buffer `samples`",
        f"BatchNorm's running mean of 0, 1, … {SAMPLES - 1}",
        "gradient of BatchNorm's weight",
    ]
    rows = zip(names, step(None), step(REPLICAS), strict=True)
    head = [f"after a step with {SAMPLES} samples", "without replicas", f"{REPLICAS} replicas"]
    print(table(head, [list(row) for row in rows]))


if __name__ == "__main__":
    main()

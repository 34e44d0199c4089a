"""Compare the sum of the replicas' gradients with their average, for three kinds of loss.

python tutorials/25_sum_or_average.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.show import table

REPLICAS = 4


def main() -> None:
    torch.manual_seed(0)
    net, rows = nn.Linear(6, 3), []
    inputs, labels = torch.randn(12, 6), torch.randn(12, 3)
    for reduction, factor in (("mean", 1), ("sum", 1), ("sum", REPLICAS)):
        expected = gradient(net, inputs, labels, reduction)
        summed = factor * gradient(DataParallel(net, REPLICAS), inputs, labels, reduction)
        # Imitate the ranks of DDP: compute a separate loss and gradient for each part of the batch.
        parts = zip(inputs.chunk(REPLICAS), labels.chunk(REPLICAS), strict=True)
        gradients = [factor * gradient(net, *part, reduction) for part in parts]
        averaged = torch.stack(gradients).mean(dim=0)
        ratios = [f"{ratio(result, expected):.2f} times" for result in (summed, averaged)]
        times = f"{factor} × " if factor > 1 else ""
        rows.append([f"{times}the {reduction} over the samples", *ratios])
    print("Each element of the gradient, relative to the gradient of the whole batch:\n")
    print(table(["the loss is", "summed, like DataParallel", "averaged, like DDP"], rows))


def gradient(net, inputs, labels, reduction: str) -> torch.Tensor:
    """Return the gradient of the loss with respect to the first parameter."""
    net.zero_grad()
    mse_loss(net(inputs), labels, reduction=reduction).backward()
    return next(net.parameters()).grad.clone()


def ratio(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the ratio of two gradients. Raises an error if it differs between elements."""
    times = (result.sum() / expected.sum()).item()
    torch.testing.assert_close(result, times * expected)
    return times


if __name__ == "__main__":
    main()

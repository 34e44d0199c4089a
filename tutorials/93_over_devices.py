"""Compare the results and memory use of methods that compute the distance between kernels.

python tutorials/93_over_devices.py
"""

import torch
import torch.distributed as dist
from kernel_distance import methods
from kernel_distance.methods import over_devices
from torch.distributed._functional_collectives import all_reduce

from accel_demo.processes.group import run_in_group
from accel_demo.show import table

LARGE = (512, 512, 3, 3)  # shape of a 9.4 MB weight in ResNet-18


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images).mean((1, 2, 3))


def use_in_a_loss(device: torch.device) -> str:
    """Subtract the distance from a loss, as a training loop does to push the kernels apart."""
    net, images = Net().to(device), torch.randn(4, 3, 9, 9, device=device)
    loss = net(images).square().mean() - 0.01 * over_devices(net.conv.weight)
    loss.backward()
    [without] = torch.autograd.grad(net(images).square().mean(), net.conv.weight)
    result = "equal" if torch.equal(net.conv.weight.grad, without) else "different"
    return f"net.conv.weight.grad with and without the distance: {result}"


def main(device: torch.device) -> None:
    ranks, rows = dist.get_world_size(), []
    weights = [torch.randn(n, 32, 3, 3, device=device, requires_grad=True) for n in (8, 16, 32)]
    for weight in weights:
        dist.broadcast(weight.data, src=0)
    expected = value_and_gradient(methods.double_loop, weights[1].double())
    for name, method in methods.METHODS.items():
        result = value_and_gradient(method, weights[1].double())
        kept = [f"{methods.graph_bytes(method, weight) / weight.nbytes:.1f}" for weight in weights]
        large = f"{methods.predicted_graph_bytes(name, LARGE, ranks) / 1e6:,.0f} MB"
        rows.append([name, "yes" if same(result, expected) else "no", *kept, large])
    head = ["method", "equal", "8 kernels", "16 kernels", "32 kernels", "512 × 512 × 3 × 3"]
    sums = compare_sums(weights[1].double(), expected)
    if dist.get_rank() == 0:
        print(f"{sums}\n")
        print(f"{table(head, rows[::-1])}\n")
        print(use_in_a_loss(device))


def compare_sums(weight: torch.Tensor, expected: tuple) -> str:
    """Return a table that compares the sums and gradients of three all-reduce functions."""
    ranks, rows = dist.get_world_size(), []
    share = value_and_gradient(rows_of_rank, weight)[1]
    for name, method in SUMS.items():
        value, gradient = value_and_gradient(method, weight)
        mean = gradient / ranks
        dist.all_reduce(mean)
        candidates = {"full gradient": expected[1], f"full gradient / {ranks}": expected[1] / ranks}
        candidates |= {"rank's share": share, f"{ranks} × rank's share": ranks * share}
        cells = [
            ", ".join(label for label in candidates if same(result, candidates[label]))
            for result in (gradient, mean)
        ]
        rows.append([name, "yes" if same(value, expected[0]) else "no", *cells])
    head = ["shares added up by", "value equal", "gradient on a rank", "mean over the ranks"]
    return table(head, rows)


def rows_of_rank(weight: torch.Tensor) -> torch.Tensor:
    kernels = weight.flatten(1)
    rows = kernels.tensor_split(dist.get_world_size())[dist.get_rank()]
    return (rows[:, None] - kernels).abs().sum()


def plain_all_reduce(weight: torch.Tensor) -> torch.Tensor:
    share = rows_of_rank(weight)
    dist.all_reduce(share)  # in place, so autograd does not record it
    return share


SUMS = {
    "`dist.all_reduce`": plain_all_reduce,
    "`_functional_collectives.all_reduce`": lambda weight: all_reduce(
        rows_of_rank(weight), "sum", dist.group.WORLD
    ),
    "`over_ranks`": methods.over_ranks,
}


def value_and_gradient(method, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = weight.detach().requires_grad_()
    value = method(leaf)
    value.backward()
    return value.detach(), leaf.grad


def same(result, expected) -> bool:
    """Return True if the errors on all ranks are at most 1e-9 times the largest expected value."""
    if torch.is_tensor(result):
        result, expected = [result], [expected]
    pairs = zip(result, expected, strict=True)
    error = max(float((value - right).abs().max() / right.abs().max()) for value, right in pairs)
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return max(errors) <= 1e-9


if __name__ == "__main__":
    run_in_group(main, 2)

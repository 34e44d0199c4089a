"""Grade exercise 93: check the total distance and its gradient on two and on three ranks."""

import sys
from pathlib import Path

from grading import Wrong, dist, grade, import_answer, naming_errors, torch

ROWS, SIZE = 4, 6  # kernels per rank, elements per kernel
RIGHT = "on two and on three processes, every rank has the total distance and its gradient"
SEED = 93


def observe(answer: Path, device) -> None:
    rank, processes = dist.get_rank(), dist.get_world_size()
    kernels = torch.randn(processes * ROWS, SIZE, generator=torch.Generator().manual_seed(SEED))
    kernels = kernels.double().to(device)
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    rows = kernels[own].clone().requires_grad_()
    total_distance = import_answer(answer).total_distance
    with naming_errors("total_distance raises"):
        total = total_distance(rows)
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        got = f"shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else f"{total!r:.60}"
        raise Wrong(f"total_distance must return a tensor with one element, got {got}")
    if total.requires_grad:
        with naming_errors("backward raises"):
            total.backward()
    expected, gradients = references(kernels, own)
    if not is_close(total.detach().reshape(()), expected):
        returned = f"{total.item():.4f} instead of {expected.item():.4f}"
        numbers = f"on rank {rank}, total_distance returns {returned}"
        share = (kernels[own, None] - kernels).abs().sum()
        is_share = is_close(total.detach().reshape(()), share)
        raise Wrong(numbers + ": only pairs with a row of this rank are counted" * is_share)
    judge_gradient(rows.grad, gradients, processes)


def judge_gradient(gradient, gradients: dict, processes: int) -> None:
    if gradient is None or not gradient.any():
        raise Wrong(
            "the total distance is correct, but its gradient is missing: all_gather cuts the graph"
        )
    if is_close(gradient, gradients["whole"]):
        return
    if is_close(gradient, processes * gradients["whole"]):
        raise Wrong(
            f"the gradient is {processes} times too large. Either every rank computes the full "
            "distance and backward adds up their gradients, or the backward of an all-reduce adds "
            "up gradients that are already complete"
        )
    if is_close(gradient, gradients["whole"] / processes):
        raise Wrong(
            f"the gradient is {processes} times too small: the gradients of the ranks must not be "
            "averaged"
        )
    if any(is_close(gradient, gradients[name]) for name in ("first of a pair", "own share")):
        raise Wrong(
            "the gradient covers only pairs whose first kernel is on this rank, but these kernels "
            "also occur in pairs whose first kernel is on another rank"
        )
    if any(is_close(gradient, part) for part in gradients["by rank"].split(len(gradient))):
        raise Wrong("the gradient belongs to the rows of another rank")
    distance = (gradient - gradients["whole"]).abs().max().item()
    raise Wrong(f"the total distance is correct, but its gradient is off by up to {distance:.1e}")


def references(kernels, own: slice) -> tuple:
    """Return the total distance, and {name: gradient} with correct and incorrect ones.

    "by rank" is the gradient of the rows of all ranks, in rank order.
    """
    rows = kernels[own].clone().requires_grad_()
    attached = torch.cat([kernels[: own.start], rows, kernels[own.stop :]])
    sums = {
        "whole": (attached[:, None] - attached).abs().sum(),
        "first of a pair": (rows[:, None] - kernels).abs().sum(),
        "own share": (rows[:, None] - attached).abs().sum(),
    }
    gradients = {name: torch.autograd.grad(total, rows)[0] for name, total in sums.items()}
    everything = kernels.clone().requires_grad_()
    total = (everything[:, None] - everything).abs().sum()
    gradients["by rank"] = torch.autograd.grad(total, everything)[0]
    return sums["whole"].detach(), gradients


def is_close(tensor, expected) -> bool:
    if tensor.shape != expected.shape:
        return False
    return bool((tensor - expected).abs().max() <= 1e-9 * expected.abs().max())


if __name__ == "__main__":
    # On two ranks, half of the gradient can come from two different mistakes, so start with three.
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(3, 2)))

"""Six differentiable functions for the distance between all kernels of a layer.

For a weight with n kernels, the distance is Σᵢ Σⱼ ‖wᵢ − wⱼ‖ over all i and j from 1 to n. Each pair
is counted twice, and i = j adds 0. ‖·‖ is the sum of the absolute differences (p=1) or the
Euclidean length (p=2). A training loop may subtract this distance from its loss to push the kernels
apart, or add it to pull them together, so the gradient must reach the weight. DataParallel
and DistributedDataParallel do not split this computation: they divide the batch, and the distance
depends only on the weight. If `forward` computes it, every replica computes all of it.

All functions take (weight, p, signed) and return a 0-dimensional tensor. The first dimension of the
weight indexes the kernels, as in Conv2d, Conv1d and Linear. float16 and bfloat16 weights are
converted to float32, because a sum of so many terms can overflow in float16 and loses precision in
both dtypes. Between two equal kernels the gradient is 0, as autograd defines it for |0| and ‖0‖.
Invalid arguments raise `ValueError`. If the weight contains NaN or infinity, the results of the
functions may differ.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def double_loop(weight: torch.Tensor, p: int = 1, signed: bool = False) -> torch.Tensor:
    """Compute pair by pair. The graph keeps all differences: n times the bytes of the weight."""
    kernels = _kernels(weight, p, signed)
    total = kernels.new_zeros(())
    for kernel in kernels:
        for other in kernels:
            total = total + torch.linalg.vector_norm(kernel - other, ord=p)
    return total


def vectorized(weight: torch.Tensor, p: int = 1, signed: bool = False) -> torch.Tensor:
    """Compute all pairs at once, which is faster than a loop. The graph keeps all differences."""
    kernels = _kernels(weight, p, signed)
    return _distance(kernels, kernels, p)


def chunked(
    weight: torch.Tensor, p: int = 1, signed: bool = False, rows_at_once: int = 4
) -> torch.Tensor:
    """Compute a few rows of pairs at a time, and recompute them in backward.

    The graph keeps no differences. In backward, the differences of `rows_at_once` rows exist for a
    moment, with two temporary tensors of the same size: about 3 × `rows_at_once` times the bytes
    of the weight. Backward takes longer, because it repeats the forward computation.
    Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    kernels = _kernels(weight, p, signed, rows_at_once)
    return _rows_distance(kernels, kernels, p, rows_at_once)


def over_ranks(
    weight: torch.Tensor, p: int = 1, signed: bool = False, rows_at_once: int | None = None
) -> torch.Tensor:
    """Split the rows of pairs among the ranks of the default process group.

    Each of N ranks needs 1/N of the time and memory. Every rank must call this with the same
    weight, and then call backward on the same function of the result. Every rank gets the same
    result and gradient as a single process. This also works under DistributedDataParallel, which
    averages N equal gradients. `rows_at_once` works as in `chunked`; if it is None, the graph keeps
    all differences of the rank's rows. If one rank's arguments are invalid, all ranks raise
    `ValueError`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("over_ranks needs a process group: call init_process_group first")
    _agree(weight, p, signed, rows_at_once)
    kernels = _CopyToRanks.apply(_kernels(weight, p, signed, rows_at_once))
    rows = kernels.tensor_split(dist.get_world_size())[dist.get_rank()]
    return _SumOverRanks.apply(_rows_distance(rows, kernels, p, rows_at_once))


def over_devices(
    weight: torch.Tensor,
    p: int = 1,
    signed: bool = False,
    devices: list[torch.device | str] | None = None,
    rows_at_once: int | None = None,
) -> torch.Tensor:
    """Split the rows of pairs among several devices of one process.

    By default, the devices are all GPUs, or the weight's device if there is no GPU. The GPUs
    compute at the same time, because each call returns before its work is done. In backward,
    autograd moves the gradients back to the weight's device. `rows_at_once` works as in
    `over_ranks`.
    """
    kernels = _kernels(weight, p, signed, rows_at_once)
    if devices is None:
        gpus = torch.accelerator.device_count()
        devices = [f"{torch.accelerator.current_accelerator()}:{gpu}" for gpu in range(gpus)]
        devices = devices or [kernels.device]
    shares = []
    for rows, device in zip(kernels.tensor_split(len(devices)), devices, strict=True):
        shares.append(_rows_distance(rows.to(device), kernels.to(device), p, rows_at_once))
    return torch.stack([share.to(kernels.device) for share in shares]).sum()


def closed_form(weight: torch.Tensor, p: int = 1, signed: bool = False) -> torch.Tensor:
    """Compute the distance for p=1 without pairs: O(n log n) time and O(n) memory per element.

    Consider the same element of all n kernels. In the derivative of Σᵢ Σⱼ |wᵢ − wⱼ| with respect to
    wₖ, each smaller value adds 2, each larger value adds −2, and each equal value adds 0. If all
    values differ, the derivative is 2·(2k − n + 1) for the k-th smallest value, with k from 0. The
    derivatives change only if the order of the values changes, so the sum is Σₖ derivativeₖ · wₖ
    (Euler's theorem on homogeneous functions). The code finds the numbers of smaller and larger
    values by binary search in the sorted values.

    The derivatives add up to 0, so subtracting the same number from all values changes neither the
    sum nor its gradient. The code subtracts the median. Without this, if the kernels lie close
    together but far from 0, large numbers would cancel and float32 would lose significant digits.
    """
    kernels = _kernels(weight, p, signed)
    if p != 1:
        raise ValueError(f"p must be 1 in closed_form, got {p}: lengths are not sums over elements")
    with torch.no_grad():
        columns = kernels.t().contiguous()
        ordered = columns.sort(dim=1).values
        smaller = torch.searchsorted(ordered, columns, out_int32=True)
        larger = len(kernels) - torch.searchsorted(ordered, columns, right=True, out_int32=True)
        derivative = smaller.sub_(larger).mul_(2).t()  # in place, to save memory
        median = ordered[:, len(kernels) // 2]  # subtracted to reduce rounding errors
    return (derivative * (kernels - median)).sum()


def _distance(rows: torch.Tensor, kernels: torch.Tensor, p: int) -> torch.Tensor:
    """Return the sum of distances from each row to each kernel. The graph keeps all differences."""
    return torch.linalg.vector_norm(rows[:, None] - kernels, ord=p, dim=-1).sum()


def _rows_distance(
    rows: torch.Tensor, kernels: torch.Tensor, p: int, rows_at_once: int | None
) -> torch.Tensor:
    if rows_at_once is None:
        return _distance(rows, kernels, p)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [
        checkpoint(_distance, part, kernels, p, **options) for part in rows.split(rows_at_once)
    ]
    return torch.stack(parts).sum()


class _CopyToRanks(torch.autograd.Function):
    """The identity in forward, and the sum of the gradients over all ranks in backward.

    This class and `_SumOverRanks` are f and g in the Megatron-LM paper:
    https://arxiv.org/abs/1909.08053
    """

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks in forward, and the identity in backward."""

    @staticmethod
    def forward(ctx, share):
        total = share.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient


def _kernels(weight, p, signed, rows_at_once=None) -> torch.Tensor:
    """Return the kernels as the rows of a matrix, in float32 or float64.

    Raises `ValueError` if an argument is invalid.
    """
    if mistake := _mistake(weight, p, signed, rows_at_once):
        raise ValueError(mistake)
    kernels = weight.flatten(1)
    return kernels.float() if kernels.dtype.itemsize < 4 else kernels


def _mistake(weight, p, signed, rows_at_once) -> str:
    """Return an error message if the arguments are invalid, else an empty string."""
    if not isinstance(weight, torch.Tensor):
        return f"weight must be a tensor, got {type(weight).__name__}; for a layer use layer.weight"
    if weight.layout != torch.strided or weight.is_nested:
        return f"weight must be dense, got {'nested' if weight.is_nested else weight.layout}"
    if weight.dtype not in DTYPES:
        return f"weight must be of a floating-point dtype, got {weight.dtype}"
    if weight.dim() < 2 or weight.numel() == 0:
        shape = tuple(weight.shape)
        return f"weight must have at least one kernel with at least one element, got shape {shape}"
    if signed:
        return (
            "signed must be False: for every wᵢ − wⱼ there is a wⱼ − wᵢ, so signed differences "
            "cancel, and the sum and its gradient are 0 for any weight"
        )
    if isinstance(p, bool) or not isinstance(p, int | float) or p not in (1, 2):
        return f"p must be 1 (absolute differences) or 2 (Euclidean distance), got {p!r}"
    is_whole = isinstance(rows_at_once, int) and not isinstance(rows_at_once, bool)
    if rows_at_once is not None and not (is_whole and rows_at_once >= 1):
        return f"rows_at_once must be an integer, at least 1, got {rows_at_once!r}"
    return ""


def _agree(weight, p, signed, rows_at_once) -> None:
    """Raise the same `ValueError` on every rank if arguments are invalid or differ between ranks.

    Without this check, some ranks could wait forever in a collective that other ranks never call.
    """
    mistakes = _of_all_ranks(_mistake(weight, p, signed, rows_at_once))
    for rank, mistake in enumerate(mistakes):
        if mistake:
            raise ValueError(f"on rank {rank}: {mistake}")
    needs_gradient = weight.requires_grad and torch.is_grad_enabled()
    arguments = {"p": p, "shape": tuple(weight.shape), "dtype": str(weight.dtype)}
    ranks = _of_all_ranks(arguments | {"needs gradient": needs_gradient})
    for name in ranks[0]:
        values = [other[name] for other in ranks]
        if any(value != values[0] for value in values):
            by_rank = ", ".join(map(str, values))
            raise ValueError(f"weight and p must match on all ranks; {name} by rank: {by_rank}")


def _of_all_ranks(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# The rest of this module helps to compare the functions with each other.


def _library(weight: torch.Tensor, p: int = 1) -> torch.Tensor:
    """Sum the distances from `torch.cdist`. The graph keeps n × n distances, but no differences."""
    kernels = weight.flatten(1)
    return torch.cdist(kernels, kernels, p=p).sum()


def _two_devices(weight: torch.Tensor, p: int = 1) -> torch.Tensor:
    """Split the rows among all GPUs. On a CPU, split them as if the CPU were two devices."""
    devices: list[torch.device | str] | None = None if weight.is_cuda else ["cpu", "cpu"]
    return over_devices(weight, p, devices=devices)


# Functions of (weight, p)
METHODS = {
    "double loop": double_loop,
    "vectorized": vectorized,
    "over devices": _two_devices,
    "over ranks": over_ranks,
    "chunked": chunked,
    "over ranks, chunked": partial(over_ranks, rows_at_once=4),
    "torch.cdist": _library,
    "closed form": closed_form,
}


def graph_bytes(compute, weight: torch.Tensor) -> int:
    """Return how many bytes the graph of `compute(weight)` keeps for backward, besides the weight.

    This adds up the tensors that autograd saves, so the result is the same on every machine.
    """
    sizes = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = compute(weight)
    sizes.pop(weight.untyped_storage().data_ptr(), None)
    del result  # not earlier, because reused memory would be counted only once
    return sum(sizes.values())


def predicted_graph_bytes(method: str, shape: tuple[int, ...], ranks: int) -> int:
    """Predict the `graph_bytes` of each process in float32, without running the method.

    A graph that keeps all differences stores, for each pair of kernels, the difference, which is as
    large as a kernel, and the distance, which takes 4 bytes.
    """
    weight_bytes = 4 * math.prod(shape)
    row_bytes = weight_bytes + 4 * shape[0]
    rows = {"double loop": shape[0], "vectorized": shape[0], "over devices": shape[0]}
    rows["over ranks"] = -(-shape[0] // ranks)
    others = {"torch.cdist": 4 * shape[0] ** 2, "closed form": weight_bytes}
    return rows[method] * row_bytes if method in rows else others.get(method, 0)


def reference(weight: torch.Tensor, p: int) -> tuple[float, torch.Tensor]:
    """Compute the distance and its gradient in float64, from formulas and without autograd."""
    kernels = weight.detach().double().cpu().flatten(1)
    value, gradient = 0.0, torch.empty_like(kernels)
    for number, kernel in enumerate(kernels):
        differences = kernel - kernels
        if p == 1:
            value += differences.abs().sum().item()
            gradient[number] = 2 * differences.sign().sum(0)
        else:
            distances = differences.square().sum(1, keepdim=True).sqrt()
            value += distances.sum().item()
            gradient[number] = 2 * (differences / distances.where(distances > 0, 1)).sum(0)
    return value, gradient.view(weight.shape)

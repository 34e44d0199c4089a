"""How far apart all kernels of a layer are: one number, six ways, each kept in the graph.

python -m accel_demo.anatomy.kernel_distance

For a weight of n kernels it is Σᵢ Σⱼ ‖wᵢ − wⱼ‖ over all i and j from 1 to n. Each pair counts
twice, as it does in a double loop over the kernels, and i = j adds 0. ‖·‖ is the sum of the
absolute differences (p=1), or their Euclidean length (p=2). A training loop may add this number to
its loss, to push kernels apart or together. So its gradient has to reach the weight, and it is a
computation outside `forward`: DataParallel and DistributedDataParallel do not split it.

All six functions take (weight, p, signed) and give a 0-dimensional tensor. The weight has the
kernels in its first dimension, as Conv2d, Conv1d and Linear have them. It may also be one that
needs no gradient. float16 and bfloat16 are computed in float32, for sums of so many terms leave
their range. Where two kernels are the same the gradient is 0, as autograd has it for |0| and ‖0‖.
Whatever else is asked for raises ValueError. The values are not looked at: where NaN or infinity is
among them the functions may differ.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from accel_demo.processes.connect import gather_objects

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def double_loop(weight: torch.Tensor, p: int = 1, signed: bool = False) -> torch.Tensor:
    """Pair by pair. The graph keeps the difference of every pair: n times the weight."""
    kernels = _kernels(weight, p, signed)
    total = kernels.new_zeros(())
    for one in kernels:
        for other in kernels:
            total = total + torch.linalg.vector_norm(one - other, ord=p)
    return total


def vectorised(weight: torch.Tensor, p: int = 1, signed: bool = False) -> torch.Tensor:
    """All pairs at once. It is faster, and the graph keeps the same n times the weight."""
    kernels = _kernels(weight, p, signed)
    return _distance(kernels, kernels, p)


def chunked(
    weight: torch.Tensor, p: int = 1, signed: bool = False, rows_at_once: int = 4
) -> torch.Tensor:
    """A few rows of pairs at a time, computed again in backward instead of kept.

    It needs `rows_at_once` times the weight for a moment, and time for a second forward.
    Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    kernels = _kernels(weight, p, signed, rows_at_once)
    return _rows_distance(kernels, kernels, p, rows_at_once)


def over_ranks(
    weight: torch.Tensor, p: int = 1, signed: bool = False, rows_at_once: int | None = None
) -> torch.Tensor:
    """Each rank of the default process group takes its share of the rows: 1/N of time and memory.

    Every rank calls it with the same weight, and every rank calls backward on the same function of
    the number. Then the number and the whole gradient are on every rank, as one process would have
    them. Under DistributedDataParallel too: it averages N equal gradients. `rows_at_once` as in
    `chunked`; None keeps the graph of the share. A mistake on one rank raises on all of them.
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
    """One process, and each device takes its share of the rows.

    By default every GPU there is, or the weight's own device where there is none. A GPU works on
    its share while the process hands out the next one. Autograd takes the gradients back the same
    way. `rows_at_once` as in `over_ranks`.
    """
    kernels = _kernels(weight, p, signed, rows_at_once)
    usable = _devices(devices, kernels.device)
    shares = []
    for rows, device in zip(kernels.tensor_split(len(usable)), usable, strict=True):
        shares.append(_rows_distance(rows.to(device), kernels.to(device), p, rows_at_once))
    return torch.stack([share.to(kernels.device) for share in shares]).sum()


def closed_form(weight: torch.Tensor, p: int = 1, signed: bool = False) -> torch.Tensor:
    """Without any pair, for p=1: O(n log n) time and O(n) memory, per element of a kernel.

    Look at one element, over all n kernels. In the derivative of Σᵢ Σⱼ |wᵢ − wⱼ| with respect to
    wₖ each smaller value counts +2, each larger one −2, and an equal one 0. Where no two are equal
    that is 2·(2k − n + 1) for the k-th smallest, k from 0. All those derivatives are constant
    between two crossings of values, so the sum itself is Σₖ derivativeₖ · wₖ (Euler's theorem on
    homogeneous functions). Sorting counts the smaller values.

    The derivatives add up to 0, so the same may be subtracted from all values: neither the sum nor
    its gradient changes. It is their median here, for otherwise large numbers would cancel where
    the kernels lie close together and far from 0, and float32 would lose the digits that count.
    """
    kernels = _kernels(weight, p, signed)
    if p != 1:
        raise ValueError(f"p must be 1 in closed_form, got {p}: lengths do not split into elements")
    with torch.no_grad():
        columns = kernels.t().contiguous()
        ordered = columns.sort(dim=1).values
        smaller = torch.searchsorted(ordered, columns, out_int32=True)
        larger = len(kernels) - torch.searchsorted(ordered, columns, right=True, out_int32=True)
        derivative = smaller.sub_(larger).mul_(2).t()  # in place, to need less memory
        median = ordered[:, len(kernels) // 2]
    return (derivative * (kernels - median)).sum()


def _distance(rows: torch.Tensor, kernels: torch.Tensor, p: int) -> torch.Tensor:
    """Of every row to every kernel. The graph keeps all differences: len(rows) times `kernels`."""
    return torch.linalg.vector_norm(rows[:, None] - kernels, ord=p, dim=-1).sum()


def _rows_distance(
    rows: torch.Tensor, kernels: torch.Tensor, p: int, rows_at_once: int | None
) -> torch.Tensor:
    if rows_at_once is None:
        return _distance(rows, kernels, p)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [
        checkpoint(_distance, part, kernels, p, **options) for part in rows.split(rows_at_once)
    ]
    return torch.stack(parts).sum()


class _CopyToRanks(torch.autograd.Function):
    """The same tensor, used by every rank for its share: their gradients are added up.

    With `_SumOverRanks` it is the pair f and g of Megatron-LM: https://arxiv.org/abs/1909.08053
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
    """The sum of all ranks' shares, the same number everywhere: its gradient is each share's."""

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
    """Each kernel as a row, in float32 at least. Raises ValueError."""
    if mistake := _mistake(weight, p, signed, rows_at_once):
        raise ValueError(mistake)
    kernels = weight.flatten(1)
    return kernels.float() if kernels.dtype.itemsize < 4 else kernels


def _mistake(weight, p, signed, rows_at_once) -> str:
    """What is wrong with the arguments, in a sentence, or nothing."""
    if not isinstance(weight, torch.Tensor):
        return f"weight must be a tensor, got {type(weight).__name__}; of a layer take layer.weight"
    if weight.layout != torch.strided or weight.is_nested:
        return f"weight must be dense, got {'nested' if weight.is_nested else weight.layout}"
    if weight.dtype not in DTYPES:
        return f"weight must be of a floating-point dtype, got {weight.dtype}"
    if weight.dim() < 2 or weight.numel() == 0:
        shape = tuple(weight.shape)
        return f"weight must have one kernel or more, of one element or more, got shape {shape}"
    if signed:
        return (
            "signed must be False: for every wᵢ − wⱼ there is a wⱼ − wᵢ, so signed differences "
            "cancel, and the sum and its gradient are 0 for any weight"
        )
    if isinstance(p, bool) or not isinstance(p, int | float) or p not in (1, 2):
        return f"p must be 1 (absolute differences) or 2 (Euclidean distance), got {p!r}"
    is_whole = isinstance(rows_at_once, int) and not isinstance(rows_at_once, bool)
    if rows_at_once is not None and not (is_whole and rows_at_once >= 1):
        return f"rows_at_once must be a whole number, at least 1, got {rows_at_once!r}"
    return ""


def _agree(weight, p, signed, rows_at_once) -> None:
    """Raise on every rank where one has a mistake, or where they ask for different things.

    Otherwise some ranks would wait in a collective that others never come to.
    """
    mine = {"mistake": _mistake(weight, p, signed, rows_at_once)}
    if not mine["mistake"]:
        needs_gradient = weight.requires_grad and torch.is_grad_enabled()
        mine |= {"p": p, "shape": tuple(weight.shape), "dtype": str(weight.dtype)}
        mine |= {"needs gradient": needs_gradient}
    ranks = gather_objects(mine)
    for rank, its in enumerate(ranks):
        if its["mistake"]:
            raise ValueError(f"on rank {rank}: {its['mistake']}")
    for name in mine:
        if any(its[name] != mine[name] for its in ranks):
            seen = ", ".join(str(its[name]) for its in ranks)
            raise ValueError(f"weight and p must be alike on every rank; {name} by rank: {seen}")


def _devices(devices, here: torch.device) -> list[torch.device]:
    """Raises ValueError where one of them cannot be used."""
    if devices is None:
        gpus = range(torch.accelerator.device_count())
        kind = torch.accelerator.current_accelerator()
        return [torch.device(f"{kind}:{gpu}") for gpu in gpus] or [here]
    if not isinstance(devices, list | tuple) or not devices:
        raise ValueError(f"devices must be a list of one device or more, got {devices!r}")
    for device in devices:
        try:
            torch.zeros(1, device=device).cpu()
        except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"devices: {device!r} cannot be used here ({reason})") from None
    return [torch.device(device) for device in devices]

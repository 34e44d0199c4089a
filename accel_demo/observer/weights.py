"""Compare tensors of several ranks without sending them: by numbers computed from their bits."""

import itertools
import sys
import weakref

from .events import emit, guarded, line_of_script
from .processes import wrap

_state = {"fsdp": False}
BEGINNING = 4096  # bytes of each tensor that are enough to see if ranks differ
PROBED, OF_EACH = 16, 256  # gradients or buffers that are compared, and the values of each


class Numbers:
    """Numbers objects. The number of a deleted object is not used again."""

    def __init__(self):
        self._known, self._next = weakref.WeakKeyDictionary(), itertools.count()

    def of(self, each) -> int:
        if each not in self._known:
            self._known[each] = next(self._next)
        return self._known[each]

    def known(self, each) -> int | None:
        return self._known.get(each)

    def objects(self) -> list:
        return list(self._known)


def stored(tensors) -> list:
    """Return the values of each tensor that are in the memory of this rank.

    These are the values of a sparse tensor without its indices, and the own shard of a DTensor.
    Tensors that store nothing readable are left out, such as those of other subclasses.
    """
    torch = sys.modules["torch"]
    found = []
    for tensor in tensors:
        tensor = tensor.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        tensor = tensor._values() if tensor.is_sparse else tensor
        is_readable = tensor.layout is torch.strided and not tensor.is_meta
        if is_readable and type(tensor) is torch.Tensor:
            found.append(tensor.resolve_conj().resolve_neg())
    return found


def sums(tensors, most: int | None = None) -> list[int] | None:
    """Return a number per tensor, of its first `most` bytes. Different bits change it, as a rule.

    Returns None if the tensors are shards of larger ones, because ranks may then differ.
    """
    tensors, plain = list(tensors), sys.modules["torch"].Tensor
    if _state["fsdp"] or any(getattr(each, "_is_flat_param", False) for each in tensors):
        return None
    if any(type(each.data) is not plain for each in tensors):  # for example a DTensor
        return None
    return [_sum(each, most) for each in stored(tensors)]


def stored_sums(tensors) -> list[int]:
    """Return a number of the beginning of each of the first tensors, also of shards."""
    return [_sum(each, BEGINNING) for each in stored(tensors[:PROBED])]


def _sum(tensor, most: int | None) -> int:
    torch = sys.modules["torch"]
    if not tensor.is_contiguous():  # for example channels_last, without a copy
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(by_stride).contiguous()
    content = tensor.view(-1).view(torch.uint8)[:most]
    if content.storage_offset() % 8:  # a view of a larger tensor cannot always be read as int64
        content = content.clone()
    whole = len(content) // 8 * 8
    value = content[:whole].view(torch.int64).sum().item() if whole else 0
    return value ^ int(content[whole:].long().sum()) if whole < len(content) else value


def total(numbers: list[int] | None) -> int | None:
    return None if numbers is None else hash(tuple(numbers))


def number_of(tensors) -> int | None:
    """Return a number of the beginning of each of the first tensors, or None without any."""
    tensors = list(itertools.islice(tensors, PROBED))
    return total(sums(tensors, BEGINNING)) if tensors else None


def magnitudes(tensors) -> list[float]:
    """Return the sum of the absolute values of the beginning of each of the first tensors."""
    return [
        each.reshape(-1)[:OF_EACH].abs().double().sum().item() for each in stored(tensors[:PROBED])
    ]


def common_factor(before: list[float], after: list[float]) -> float | None:
    """Return the factor by which all magnitudes have changed, or None if they differ in that."""
    if len(before) != len(after):
        return None
    factors = [new / old for old, new in zip(before, after, strict=True) if old > 0]
    if not factors or max(factors) > min(factors) * 1.0001 or not min(factors) > 0:
        return None
    return factors[0]


def observe_fsdp(module) -> None:
    """Notice FullyShardedDataParallel: with `use_orig_params`, its shards look like tensors."""
    wrap("__init__", lambda *_: _state.update(fsdp=True), module.FullyShardedDataParallel)


def observe_tensor_parallel(module) -> None:
    wrap("parallelize_module", lambda *_: _divided(), module)


@guarded
def _divided() -> None:
    emit("tensor parallel", line=line_of_script(5))

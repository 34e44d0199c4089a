"""Which gradient lies where: the buckets in which DistributedDataParallel sends gradients.

A bucket is one flat tensor. Its place in the bucket decides in which order the ranks' values of an
element are added, so two layouts give two results, apart in their last bits.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

MIB = 2**20
NO_LIMIT = (sys.maxsize,)


@dataclass
class Bucket:
    """Some gradients one behind the other. `views` shows each in the shape of its parameter."""

    indices: list[int]  # of its parameters, in the order in which they lie
    flat: torch.Tensor
    views: list[torch.Tensor] = field(repr=False)
    missing: set[int] = field(default_factory=set)  # indices whose gradient is not there yet

    @property
    def size(self) -> int:
        """In bytes."""
        return self.flat.numel() * self.flat.element_size()


def size_limits(bucket_mib: float | None) -> tuple[int, ...]:
    """The limits in bytes for `bucket_cap_mb=bucket_mib` of DDP: of the first bucket, of others.

    The first is smaller by default, so that something is on its way soon.
    Source: `_BucketCapacityConfig` in torch/nn/parallel/distributed.py
    """
    if bucket_mib is None:
        return (1 * MIB, 25 * MIB)
    if not bucket_mib > 0:
        raise ValueError(f"bucket_mib must be above 0, got {bucket_mib}")
    return (int(bucket_mib * MIB),)


def assign_buckets(
    tensors: Sequence[torch.Tensor], limits: Sequence[int], order: Sequence[int] | None = None
) -> list[list[int]]:
    """Deal the tensors out to buckets, as DDP does; gives the indices of each bucket.

    A bucket holds one dtype on one device. It is closed when it has *reached* its limit in bytes,
    so it is often larger. Each kind's first bucket has the first limit, the next one the second;
    the last limit holds for all others. `order` is the order in which gradients became ready.
    Source: compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp
    """
    full, open_buckets, closed = [], {}, {}
    for index in range(len(tensors)) if order is None else order:
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.device)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(index)
        size = sum(tensors[one].numel() * tensors[one].element_size() for one in bucket)
        count = closed.get(kind, 0)
        if size >= limits[min(count, len(limits) - 1)]:
            full.append(open_buckets.pop(kind))
            closed[kind] = count + 1
    buckets = [*full, *open_buckets.values()]
    return sorted(buckets, key=min) if order is None else buckets


def lay_out(parameters: Sequence[torch.Tensor], indices: list[int]) -> Bucket:
    """An empty bucket for the gradients of these parameters."""
    chosen = [parameters[index] for index in indices]
    length = sum(parameter.numel() for parameter in chosen)
    flat = torch.zeros(length, dtype=chosen[0].dtype, device=chosen[0].device)
    views, offset = [], 0
    for parameter in chosen:
        # Autograd lays a gradient out in memory as its parameter is (channels last, say), and so
        # does DDP in the bucket: elements that moved would be added in another order.
        strides = torch.empty_like(parameter, device="meta").stride()
        if strides != parameter.stride():  # it has gaps: then both take the plain layout
            strides = torch.empty(parameter.shape, device="meta").stride()
        views.append(flat.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return Bucket(list(indices), flat, views)

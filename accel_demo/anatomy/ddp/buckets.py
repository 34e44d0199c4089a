"""The buckets in which DistributedDataParallel sends gradients.

A bucket is one flat tensor that contains several gradients. The position of a gradient in its
bucket determines the order in which the ranks' values are added. So with different buckets, the
results may differ in their last bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

MIB = 2**20


@dataclass
class Bucket:
    """Several gradients, stored one after the other in `flat`.

    Each tensor in `views` is a view of one gradient in `flat`, with the shape of its parameter.
    """

    indices: list[int]  # indices of parameters, in the order of their gradients in `flat`
    flat: torch.Tensor
    views: list[torch.Tensor] = field(repr=False)
    missing: set[int] = field(default_factory=set)  # parameters whose gradient is not ready yet


def size_limits(bucket_mib: float | None) -> tuple[int, ...]:
    """Return DDP's size limits in bytes for `bucket_cap_mb=bucket_mib`.

    By default, the first bucket has a smaller limit than the others, so that sending starts early.
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
    """Assign tensors to buckets as DDP does, and return the tensor indices of each bucket.

    A bucket contains tensors of one dtype on one device. It is closed only when its size reaches
    the limit in bytes, so it is often larger than the limit. For each dtype and device, `limits`
    lists the limits of the first bucket, the second bucket, and so on. The last limit applies to
    all further buckets. `order` is the order in which gradients became ready, if it is known.
    Source: compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp
    """
    full, open_buckets, closed_counts = [], {}, {}
    for index in range(len(tensors)) if order is None else order:
        kind = (tensors[index].dtype, tensors[index].device)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(index)
        closed = closed_counts.get(kind, 0)
        limit = limits[min(closed, len(limits) - 1)]
        if sum(tensors[member].nbytes for member in bucket) >= limit:
            full.append(open_buckets.pop(kind))
            closed_counts[kind] = closed + 1
    buckets = [*full, *open_buckets.values()]
    return sorted(buckets, key=min) if order is None else buckets


def make_bucket(parameters: Sequence[torch.Tensor], indices: list[int]) -> Bucket:
    """Return a bucket of zeros for the gradients of the parameters at these indices."""
    members = [parameters[index] for index in indices]
    length = sum(parameter.numel() for parameter in members)
    flat = torch.zeros(length, dtype=members[0].dtype, device=members[0].device)
    views, offset = [], 0
    for parameter in members:
        # As in autograd and DDP, a gradient has the strides of its parameter (for example, channels
        # last). With other strides, the ranks' values would be added in a different order.
        strides = torch.empty_like(parameter, device="meta").stride()
        # If the parameter's memory has gaps, autograd and DDP use the default strides.
        if strides != parameter.stride():
            strides = torch.empty(parameter.shape, device="meta").stride()
        views.append(flat.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return Bucket(list(indices), flat, views)

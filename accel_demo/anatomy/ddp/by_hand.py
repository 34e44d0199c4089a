"""DistributedDataParallel rebuilt in stages, until its results match PyTorch's bit for bit.

Stage 1 is `broadcast_from_rank_0` in replicas.py, which gives all ranks the weights of rank 0. This
module contains stage 2 (`average_each`), stage 3 (`average_flat`) and stage 4 (`HandmadeDDP`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.anatomy.ddp.buckets import Bucket, assign_buckets, make_bucket, size_limits
from accel_demo.anatomy.ddp.replicas import broadcast_from_rank_0, check_replicas, parameters_behind


def average_each(parameters) -> None:
    """Replace each gradient by its mean over all ranks, with one all-reduce per parameter."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def average_flat(
    parameters, multiply: bool, reverse: bool, all_reduce: Callable = dist.all_reduce
) -> None:
    """Replace each gradient by its mean over all ranks, with one all-reduce of a flat buffer.

    With N ranks, the gradients are multiplied by 1/N before the all-reduce if `multiply` is True.
    Otherwise the sum is divided by N. If `reverse` is True, the last parameter comes first in the
    buffer. `all_reduce` adds up a tensor over all ranks, in place.
    """
    parameters, world_size = list(parameters), dist.get_world_size()
    order = list(range(len(parameters)))
    bucket = make_bucket(parameters, order[::-1] if reverse else order)
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        view.copy_(parameters[index].grad)
    if multiply:
        bucket.flat *= 1 / world_size
    all_reduce(bucket.flat)
    if not multiply:
        bucket.flat /= world_size
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        parameters[index].grad.copy_(view)


class HandmadeDDP(nn.Module):
    """A module wrapper like `DistributedDataParallel`, whose results it matches bit for bit.

    A full bucket is sent while backward is still computing the gradients of earlier layers.
    `bucket_mib` works like DDP's `bucket_cap_mb`. `events` lists the events of the last backward
    outside `no_sync`: ("gradient", index of a parameter), or ("start" or "end", number of a bucket)
    for its all-reduce. Gradients must be dense. Raises `ValueError` on every rank if the ranks'
    modules or options do not match. (DDP accepts different bucket sizes, and uses rank 0's.)
    Source: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp
    """

    def __init__(
        self, module: nn.Module, bucket_mib: float | None = None, find_unused_parameters=False
    ):
        super().__init__()
        check_replicas(module, bucket_mib=bucket_mib, find_unused_parameters=find_unused_parameters)
        self.module, self.limits = module, size_limits(bucket_mib)
        self.find_unused_parameters = find_unused_parameters
        self.names = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
        self.trainable = [tensor for tensor in module.parameters() if tensor.requires_grad]
        broadcast_from_rank_0([*module.parameters(), *module.buffers()])
        # Before the first backward, the order in which gradients become ready is unknown, so the
        # first step uses one bucket, in registration order. If parameters may be unused, the order
        # may change in each step, so the first buckets have size limits and are kept.
        limits = self.limits if find_unused_parameters else (sys.maxsize,)
        self._use_buckets(assign_buckets(self.trainable, limits)[::-1])
        self.ready_order: list[int] | None = None
        self.has_rebuilt = find_unused_parameters
        self.is_sharing = True  # False inside no_sync
        self.sends_buffers = True  # whether the next forward broadcasts buffers
        self.expects_gradients = False
        self.used: set[int] = set()
        self.events: list[tuple[str, int]] = []
        for index, parameter in enumerate(self.trainable):
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))

    def forward(self, *inputs, **named_inputs):
        if torch.is_grad_enabled() and self.ready_order and not self.has_rebuilt:
            self._rebuild_buckets()
        if self.sends_buffers:
            broadcast_from_rank_0(self.module.buffers())
        output = self.module(*inputs, **named_inputs)
        # The next forward sends the buffers only if this forward is outside no_sync, so they are
        # sent once per optimizer step.
        self.sends_buffers = torch.is_grad_enabled() and self.is_sharing
        if self.sends_buffers:
            self._prepare_backward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sending them if the forward call is inside this context."""
        was_sharing, self.is_sharing = self.is_sharing, False
        try:
            yield
        finally:
            self.is_sharing = was_sharing

    def _use_buckets(self, assignment: list[list[int]]) -> None:
        self.buckets = [make_bucket(self.trainable, indices) for indices in assignment]
        self.places = {
            index: (bucket, view)
            for bucket in self.buckets
            for index, view in zip(bucket.indices, bucket.views, strict=True)
        }

    def _rebuild_buckets(self) -> None:
        """Rebuild the buckets in the order in which rank 0's gradients became ready in step 1."""
        order = torch.tensor(self.ready_order, device=self.trainable[0].device)
        dist.broadcast(order, src=0)
        self._use_buckets(assign_buckets(self.trainable, self.limits, order.tolist()))
        self.has_rebuilt = True

    def _prepare_backward(self, output) -> None:
        self.expects_gradients, self.is_running = True, False
        self.ready, self.started, self.events = [], [], []
        for bucket in self.buckets:
            bucket.missing = set(bucket.indices)
        self.unused = []
        if self.find_unused_parameters:
            needed = parameters_behind(output)
            self.unused = [i for i, weight in enumerate(self.trainable) if id(weight) not in needed]

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Put a new gradient into its bucket. Autograd calls this after it has updated `.grad`."""
        self.used.add(index)  # even in a backward under no_sync
        if not self.expects_gradients:
            return
        if not self.is_running:
            self.is_running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
            for unused in self.unused:  # do not wait for gradients of unused parameters
                self._put_into_bucket(unused)
        self.events.append(("gradient", index))
        self._put_into_bucket(index)

    def _put_into_bucket(self, index: int) -> None:
        bucket, view = self.places[index]
        if index not in bucket.missing:
            raise ValueError(f"{self.names[index]} got its gradient twice in one backward")
        gradient = self.trainable[index].grad
        if gradient is None:
            view.zero_()
        else:  # multiply as DDP does: dividing by N may round differently
            torch.mul(gradient.detach(), 1 / dist.get_world_size(), out=view)
        self.ready.append(index)
        bucket.missing.remove(index)
        # All ranks must send in the same order, so a full bucket waits until all buckets before
        # it are full.
        for next_bucket in self.buckets[len(self.started) :]:
            if next_bucket.missing:
                break
            self._start_all_reduce(next_bucket)

    def _start_all_reduce(self, bucket: Bucket) -> None:
        number = len(self.started)
        self.events.append(("start", number))

        def at_end(future):
            self.events.append(("end", number))
            return future.value()

        work = dist.all_reduce(bucket.flat, async_op=True)
        self.started.append(work.get_future().then(at_end))

    def _finish_backward(self) -> None:
        """Wait for the all-reduces, then copy the means to `.grad`. Runs at the end of backward."""
        missing = [i for bucket in self.buckets for i in bucket.missing]
        if missing and not self.find_unused_parameters:
            names = ", ".join(self.names[index] for index in sorted(missing))
            raise ValueError(
                f"{names} got no gradient in this backward. Remove what the loss does not use, "
                "or set find_unused_parameters=True"
            )
        for index in missing:  # these parameters affect only outputs that the loss does not use
            if self.trainable[index].grad is not None:
                self.used.add(index)
            self._put_into_bucket(index)
        used_on_any_rank = self._used_on_any_rank()
        for future in self.started:
            future.wait()
        with torch.no_grad():
            for index, (_, view) in self.places.items():
                parameter = self.trainable[index]
                if index not in used_on_any_rank:
                    continue  # the local gradient stays unchanged
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)
        self.used, self.expects_gradients = set(), False
        self.ready_order = self.ready_order or self.ready

    def _used_on_any_rank(self) -> set[int]:
        """Return the indices of the parameters that at least one rank has used in this step."""
        if not self.find_unused_parameters:
            return set(range(len(self.trainable)))
        is_used = [index in self.used for index in range(len(self.trainable))]
        counts = torch.tensor(is_used, dtype=torch.int32, device=self.trainable[0].device)
        dist.all_reduce(counts)
        return set(counts.nonzero().flatten().tolist())

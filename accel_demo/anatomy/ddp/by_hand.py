"""DistributedDataParallel by hand, in stages, down to the last bit of what it computes.

python -m accel_demo.anatomy.ddp
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.anatomy.ddp.buckets import NO_LIMIT, Bucket, assign_buckets, lay_out, size_limits
from accel_demo.anatomy.ddp.replicas import broadcast_from_rank_0, check_replicas, parameters_behind

# Stage 1: everyone starts from rank 0's weights, by `broadcast_from_rank_0` in replicas.py
# Stage 2: one all-reduce for each parameter, after backward


def average_each(parameters) -> None:
    """The mean over all ranks of each gradient: the sum, then divided."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# Stage 3: one flat buffer, one all-reduce


def average_flat(parameters, multiply: bool, reverse: bool) -> None:
    """The same mean through one buffer, which holds the gradients in the parameters' order.

    `multiply` takes each gradient times 1/N before they are added, where else the sum is divided
    by N. `reverse` lays them out from the last parameter to the first.
    """
    parameters, world_size = list(parameters), dist.get_world_size()
    order = range(len(parameters))
    bucket = lay_out(parameters, list(reversed(order)) if reverse else list(order))
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        view.copy_(parameters[index].grad)
    if multiply:
        bucket.flat *= 1 / world_size
    dist.all_reduce(bucket.flat)
    if not multiply:
        bucket.flat /= world_size
    for index, view in zip(bucket.indices, bucket.views, strict=True):
        parameters[index].grad.copy_(view)


# Stage 4: buckets that leave while backward is still at work


class HandmadeDDP(nn.Module):
    """Wraps a module as `DistributedDataParallel` does, and computes the same bits.

    `bucket_mib` is DDP's `bucket_cap_mb`. `buckets` are those in use now. `events` tells what
    happened in the last shared backward: ("gradient", parameter), ("start", bucket) or ("end",
    bucket), and the time in seconds by `time.perf_counter`. Gradients have to be dense.
    Raises `ValueError` on every rank where the replicas cannot be trained together, or are not
    given the same options. (DDP takes rank 0's size of buckets.)
    Source: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_mib: float | None = None,
        find_unused_parameters: bool = False,
    ):
        super().__init__()
        options = {"bucket_mib": bucket_mib, "find_unused_parameters": find_unused_parameters}
        check_replicas(module, **options)
        self.limits = size_limits(bucket_mib)
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self.names, self.trained = list(trained), list(trained.values())
        broadcast_from_rank_0([*module.parameters(), *module.buffers()])
        # At first in the order of registration, and in one bucket: the order in which gradients
        # become ready is not known yet. Where it may change in each step it is never known.
        limits = self.limits if find_unused_parameters else NO_LIMIT
        self._use_buckets(assign_buckets(self.trained, limits)[::-1])
        self.ready_order: list[int] | None = None
        self.has_rebuilt = find_unused_parameters
        self.is_sharing = True  # not within no_sync
        self.buffers_are_due = True
        self.expects_gradients = False
        self.used: set[int] = set()
        self.events: list[tuple[str, int, float]] = []
        for index, parameter in enumerate(self.trained):
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))

    def forward(self, *inputs, **named_inputs):
        if torch.is_grad_enabled() and self.ready_order and not self.has_rebuilt:
            self._rebuild_buckets()
        if self.buffers_are_due:
            broadcast_from_rank_0(self.module.buffers())
        output = self.module(*inputs, **named_inputs)
        # Buffers are sent before a forward that follows a shared one: once in a window of no_sync.
        self.buffers_are_due = torch.is_grad_enabled() and self.is_sharing
        if self.buffers_are_due:
            self._prepare_backward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of what is passed forward in here only add up, each rank for itself."""
        before, self.is_sharing = self.is_sharing, False
        try:
            yield
        finally:
            self.is_sharing = before

    def _use_buckets(self, assignment: list[list[int]]) -> None:
        self.buckets = [lay_out(self.trained, indices) for indices in assignment]
        self.places = {
            index: (bucket, view)
            for bucket in self.buckets
            for index, view in zip(bucket.indices, bucket.views, strict=True)
        }

    def _rebuild_buckets(self) -> None:
        """From the second step on: in the order in which rank 0 had its gradients in the first."""
        order = torch.tensor(self.ready_order, device=self.trained[0].device)
        dist.broadcast(order, src=0)
        self._use_buckets(assign_buckets(self.trained, self.limits, order.tolist()))
        self.has_rebuilt = True

    def _prepare_backward(self, output) -> None:
        self.expects_gradients, self.is_running = True, False
        self.ready, self.started, self.events = [], [], []
        for bucket in self.buckets:
            bucket.missing = set(bucket.indices)
        self.outside = []
        if self.find_unused_parameters:
            found = parameters_behind(output)
            self.outside = [i for i, one in enumerate(self.trained) if id(one) not in found]

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd calls this when a parameter's gradient has been added to `.grad`."""
        self.used.add(index)  # in a no_sync backward too
        if not self.expects_gradients:
            return
        if not self.is_running:
            self.is_running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
            for unused in self.outside:  # nobody has to wait for them
                self._put_into_bucket(unused)
        self._note("gradient", index)
        self._put_into_bucket(index)

    def _put_into_bucket(self, index: int) -> None:
        bucket, view = self.places[index]
        if index not in bucket.missing:
            raise ValueError(f"{self.names[index]} got its gradient twice in one backward")
        gradient = self.trained[index].grad
        if gradient is None:
            view.zero_()
        else:  # times 1/N: dividing by N rounds to other bits where N is no power of two
            torch.mul(gradient.detach(), 1 / dist.get_world_size(), out=view)
        self.ready.append(index)
        bucket.missing.remove(index)
        # In the order of the buckets, and not as they fill up: all ranks have to agree on it.
        for bucket in self.buckets[len(self.started) :]:
            if bucket.missing:
                break
            self._start_all_reduce(bucket)

    def _start_all_reduce(self, bucket: Bucket) -> None:
        number = len(self.started)
        self._note("start", number)

        def at_end(future):
            self._note("end", number)
            return future.value()

        work = dist.all_reduce(bucket.flat, async_op=True)
        self.started.append(work.get_future().then(at_end))

    def _finish_backward(self) -> None:
        """Called by autograd at the end of backward: wait, and give each parameter its mean."""
        missing = [i for bucket in self.buckets for i in bucket.missing]
        if missing and not self.find_unused_parameters:
            names = ", ".join(self.names[index] for index in sorted(missing))
            raise ValueError(
                f"{names} got no gradient in this backward: leave out what the loss does not use, "
                "or set find_unused_parameters=True"
            )
        for index in missing:  # behind an output that the loss has left out
            if self.trained[index].grad is not None:
                self.used.add(index)
            self._put_into_bucket(index)
        used_somewhere = self._used_somewhere()
        for future in self.started:
            future.wait()
        with torch.no_grad():
            for index, (_, view) in self.places.items():
                parameter = self.trained[index]
                if index not in used_somewhere:
                    continue  # its gradient stays as it was
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)
        self.used, self.expects_gradients = set(), False
        self.ready_order = self.ready_order or self.ready

    def _used_somewhere(self) -> set[int]:
        """The parameters that at least one rank has used in this step."""
        if not self.find_unused_parameters:
            return set(range(len(self.trained)))
        marks = [index in self.used for index in range(len(self.trained))]
        counts = torch.tensor(marks, dtype=torch.int32, device=self.trained[0].device)
        dist.all_reduce(counts)
        return set(counts.nonzero().flatten().tolist())

    def _note(self, what: str, number: int) -> None:
        self.events.append((what, number, time.perf_counter()))

"""Record when each optimizer step ends, and how many samples the loaders have returned for it.

Nothing else of the training is observed, because that would make the steps longer.
"""

import functools
import sys
import weakref
from collections import deque

from . import limits, loaders
from .events import emit, guarded

_requested: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # iterator -> sizes of batches


class _Timed:
    """The optimizer whose steps are timed: the first one that makes a step."""

    optimizer: weakref.ref | None = None
    steps = 0
    samples = 0  # since its last step


def observe_torch(torch) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    next_index, next_batch = iterator._next_index, iterator.__next__

    @functools.wraps(next_index)
    def observed_index(self):
        indices = next_index(self)
        _request(self, indices)
        return indices

    @functools.wraps(next_batch)
    def observed_batch(self):
        batch = next_batch(self)
        _count(self)
        return batch

    iterator._next_index, iterator.__next__ = observed_index, observed_batch
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    loaders.mute_workers(torch)


@guarded
def _request(iterator, indices) -> None:
    """Remember the size of a batch. Loader workers prepare it long before it is returned."""
    size = len(indices) if isinstance(indices, (list, tuple)) else 0  # 0: one sample, or a batch
    _requested.setdefault(iterator, deque()).append(size)


@guarded
def _count(iterator) -> None:
    sizes = _requested.get(iterator)
    size = sizes.popleft() if sizes else 0
    if sys.modules["torch"].is_grad_enabled():  # otherwise, the script evaluates the model
        _Timed.samples += size


@guarded
def _before_step(optimizer, args, kwargs) -> None:
    if sys.modules["torch"].compiler.is_compiling():
        return
    if _Timed.optimizer is None or _Timed.optimizer() is None:
        _Timed.optimizer = weakref.ref(optimizer)
    if _Timed.optimizer() is optimizer:
        limits.end_run_after(_Timed.steps)


@guarded
def _after_step(optimizer, args, kwargs) -> None:
    torch = sys.modules["torch"]
    is_timed = _Timed.optimizer is not None and _Timed.optimizer() is optimizer
    if torch.compiler.is_compiling() or not is_timed:
        return
    device = optimizer.param_groups[0]["params"][0].device.type
    if device != "cpu":
        torch.accelerator.synchronize()  # so that the step includes all its kernels
    emit(
        "step",
        optimizer=0,
        number=_Timed.steps,
        samples=_Timed.samples,
        device=device,
        threads=torch.get_num_threads(),
    )
    _Timed.steps += 1
    _Timed.samples = 0

"""Observe backward passes, optimizer steps and `zero_grad`, and compare the weights.

Only class-level hooks and weak references: a hook on a model would be pickled and copied with it.
"""

import functools
import sys
from contextlib import contextmanager

from . import ends, limits, loaders, losses, models
from .collectives import counted
from .events import emit, guarded, line_of_script
from .processes import wrap
from .weights import BEGINNING, common_factor, magnitudes, number_of, stored, sums, total
from .windows import (
    Backwards,
    Window,
    gradients_of,
    holders_of,
    optimizers,
    parameters_of,
    used_parameters_of,
    window_of,
)

MOST_GRADIENTS = 20  # backward passes, and steps of an optimizer, whose gradients are compared
MOST_GROUPS = 20  # parameter groups whose settings are recorded
_accumulation = {"steps": 1}  # micro-batches per step, inside `accelerator.accumulate`
_stepping: list = []  # optimizers whose `step` is running, the outermost first


def stepping() -> list:
    """Return the optimizers whose `step` is running, the outermost first."""
    return _stepping


def observe_torch(torch) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def unless_compiled(hook):  # the compiler would make the hook a part of the step
        def observed(optimizer, args, kwargs):
            if not torch.compiler.is_compiling():
                hook(optimizer, args, kwargs)

        return observed

    register_optimizer_step_pre_hook(unless_compiled(_before_step))
    register_optimizer_step_post_hook(unless_compiled(_after_step))
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def observed_backward(*args, **kwargs):
        before = counted()
        is_early = Backwards.count < MOST_GRADIENTS
        about_loss = losses.about(_accumulation["steps"], is_early, *args)
        result = backward(*args, **kwargs)
        _backward_done(before, about_loss or losses.UNKNOWN)
        return result

    torch.autograd.backward = observed_backward
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        wrap("zero_grad", _zeroed, owner)
    models.observe_construction(torch.optim.Optimizer, _constructed)


@guarded
def _constructed(optimizer) -> None:
    if not _stepping:
        emit("optimizer", optimizer=window_of(optimizer).number, line=line_of_script(4))


@guarded
def _backward_done(before: list[int] | None, about_loss: dict) -> None:
    Backwards.count += 1
    loaders.mark_training()
    forwards = models.take_forwards()
    is_local = before is not None and before == counted()
    is_early = Backwards.count <= MOST_GRADIENTS
    emit(
        "backward",
        number=Backwards.count,
        line=line_of_script(4),
        replicas=[[number, is_averaged] for number, is_averaged, _ in forwards],
        samples=forwards[-1][2] if forwards else [],
        micro_batches=_accumulation["steps"],
        gradients=_sum_of_gradients() if is_local and is_early else 0,
        **about_loss,
    )
    is_averaged = bool(forwards) and all(each[1] for each in forwards) and not models.has_hooks()
    for optimizer in optimizers():
        window = window_of(optimizer)
        window.averaged = magnitudes(gradients_of(optimizer)) if is_averaged and is_early else []


def _sum_of_gradients() -> int:
    """Return a number of the gradients of all optimizers, as `sums` does; 0 without any."""
    found = sums([each for optimizer in optimizers() for each in gradients_of(optimizer)])
    return hash(tuple(found)) if found and any(found) else 0


@guarded
def _before_step(optimizer, args, kwargs) -> None:
    if optimizer in _stepping:  # its last step has raised an error
        del _stepping[_stepping.index(optimizer) :]
    _stepping.append(optimizer)
    if len(_stepping) > 1:  # an optimizer in an optimizer, such as ZeroRedundancyOptimizer
        return
    window = window_of(optimizer)
    limits.end_run_after(window.steps)
    parameters = parameters_of(optimizer)
    used = used_parameters_of(optimizer, models.replicas.objects())
    window.before = total(sums(used, BEGINNING))
    window.at_step = _gradients_at_step(optimizer, window)
    if window.steps == 0:
        shapes = [list(each.shape) for each in parameters]
        emit("weights", optimizer=window.number, sums=sums(used), shapes=shapes)
    if window.steps & (window.steps - 1) == 0:  # before the steps 0, 1, 2, 4, 8, …
        holders = {
            id(parameter): window_of(each).number
            for each in optimizers()
            for parameter in parameters_of(each)
        }
        emit("models", models=models.snapshot(holders), optimizer=window.number)


def _gradients_at_step(optimizer, window: Window) -> dict:
    """Return a number of the gradients, and the factor by which the script has changed them.

    `factor` is None if it is unknown, or if they were clipped or unscaled.
    """
    if window.steps >= MOST_GRADIENTS:
        return {}
    gradients = gradients_of(optimizer)
    factor = None
    if window.averaged and not window.is_clipped and window.scale is None:
        factor = common_factor(window.averaged, magnitudes(gradients))
    return {
        "has_gradients": any(magnitudes(gradients)),
        "factor": factor,
        "gradients": number_of(gradients),
        "buffers": models.buffers(),
    }


@guarded
def _after_step(optimizer, args, kwargs) -> None:
    del _stepping[_stepping.index(optimizer) :]
    if _stepping:
        return
    window, parameters = window_of(optimizer), parameters_of(optimizer)
    emit(
        "step",
        optimizer=window.number,
        name=type(optimizer).__name__,
        number=window.steps,
        line=line_of_script(4),
        backwards=Backwards.count - window.backwards_at_step,
        accumulated=Backwards.count - window.backwards_at_zero,
        before=window.before,
        total=total(sums(used_parameters_of(optimizer, models.replicas.objects()))),
        parameters=len(parameters),
        scale=window.scale,
        without_gradient=[n for n, each in enumerate(parameters) if each.grad is None],
        settings=[settings_of(group) for group in optimizer.param_groups[:MOST_GROUPS]],
        **window.at_step,
    )
    window.reset()
    window.gradients = _versions(optimizer)


def settings_of(group: dict) -> dict:
    """Return the settings of a parameter group that are numbers, such as its learning rate."""
    torch = sys.modules["torch"]
    values = {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in group.items()
    }
    return {name: value for name, value in values.items() if isinstance(value, (int, float, tuple))}


def _versions(optimizer) -> int:
    """Return a number that changes whenever a gradient does."""
    return sum(each._version + 1 for each in gradients_of(optimizer))


@guarded
def _zeroed(owner, *args) -> None:
    """Record gradients that are set to zero before a step has used them.

    A step may call it for a closure, and a script may skip gradients that are not finite.
    """
    if _stepping:
        return
    is_optimizer = isinstance(owner, sys.modules["torch"].optim.Optimizer)
    holders = holders_of(parameters_of(owner) if is_optimizer else owner.parameters())
    for optimizer in [owner] if is_optimizer else holders:
        window, versions = window_of(optimizer), _versions(optimizer)
        thrown = Backwards.count - window.backwards_at_zero
        is_new = thrown and versions != window.gradients and window.scale is None
        if is_new and all(each.isfinite().all() for each in stored(gradients_of(optimizer))):
            emit("thrown", optimizer=window.number, backwards=thrown, line=line_of_script(4))
        window.gradients = 0
    for optimizer in holders:  # also one that wraps the owner, or that it wraps
        window = window_of(optimizer)
        window.backwards_at_zero, window.is_unscaled = Backwards.count, False


def observe_groups(module) -> None:
    """Record the weights when the process group is destroyed, and when the process ends.

    A script may have deleted its optimizers before it ends.
    """
    wrap("destroy_process_group", lambda *_: _ending(), module, sys.modules["torch.distributed"])
    ends.before_end.append(_ending)


@guarded
def _ending() -> None:
    for optimizer in optimizers():
        window = window_of(optimizer)
        if window.steps:
            numbers = sums(used_parameters_of(optimizer, models.replicas.objects()))
            emit("last weights", optimizer=window.number, total=total(numbers))


def observe_local_sgd(module) -> None:
    """Record how many local steps Accelerate's LocalSGD makes between two averages."""
    wrap("__enter__", _local_steps, module.LocalSGD)


@guarded
def _local_steps(local_sgd) -> None:
    if local_sgd.enabled:
        emit("local steps", every=local_sgd.local_sgd_steps, line=line_of_script(3))


def observe_accelerate(accelerate) -> None:
    wrap("prepare", _prepared, accelerate.Accelerator)
    original = accelerate.Accelerator.accumulate

    @functools.wraps(original)
    @contextmanager
    def accumulate(self, *models):
        with original(self, *models):
            _accumulation["steps"] = getattr(self, "gradient_accumulation_steps", 1)
            try:
                yield
            finally:
                _accumulation["steps"] = 1

    accelerate.Accelerator.accumulate = accumulate


@guarded
def _prepared(accelerator, *objects) -> None:
    torch = sys.modules["torch"]
    names = {
        "model": torch.nn.Module,
        "optimizer": torch.optim.Optimizer,
        "loader": torch.utils.data.DataLoader,
        "scheduler": torch.optim.lr_scheduler.LRScheduler,
    }
    kinds = [name for each in objects for name, kind in names.items() if isinstance(each, kind)]
    emit("prepared", kinds=kinds, line=line_of_script(4))

"""Observe when gradients are clipped, and whether a `GradScaler` has still scaled them then."""

import functools

from .events import emit, guarded, line_of_script
from .processes import wrap
from .weights import stored_sums, total
from .windows import Backwards, holders_of, window_of


def observe_torch(torch) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        observed = _observed_clip(torch, getattr(torch.nn.utils, name))
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(owner, name, observed)
    wrap("unscale_", _unscaled, torch.amp.GradScaler)
    wrap("step", _scaled_step, torch.amp.GradScaler)


def observe_sharded_scaler(module) -> None:
    wrap("unscale_", _unscaled, module.ShardedGradScaler)


def _observed_clip(torch, original):
    @functools.wraps(original)
    def clip(parameters, *args, **kwargs):
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        is_single = isinstance(parameters, torch.Tensor)
        parameters = [parameters] if is_single else list(parameters)  # it may be a generator
        before = _sums_of_gradients(parameters)
        result = original(parameters, *args, **kwargs)
        _clipped(parameters, before)
        return result

    return clip


@guarded
def _sums_of_gradients(parameters) -> list[int]:
    return stored_sums([each.grad for each in parameters if each.grad is not None])


@guarded
def _clipped(parameters, before: list[int] | None) -> None:
    is_changed = before != _sums_of_gradients(parameters)
    for optimizer in holders_of(parameters):
        window = window_of(optimizer)
        window.is_clipped |= is_changed
        emit(
            "clip",
            optimizer=window.number,
            step=window.steps,
            backwards=Backwards.count,
            is_used=Backwards.count == window.backwards_at_step and window.steps > 0,
            is_changed=is_changed,
            is_unscaled=window.is_unscaled,
            gradients=total(before),
            line=line_of_script(3),
        )


@guarded
def _unscaled(scaler, optimizer=None) -> None:
    if optimizer is not None and scaler.is_enabled():
        window_of(optimizer).is_unscaled = True


@guarded
def _scaled_step(scaler, optimizer=None, *args) -> None:
    """A scaler skips the step if a gradient is infinite. The gradients are then not lost."""
    if optimizer is not None and scaler.is_enabled():
        window_of(optimizer).scale = scaler.get_scale()

"""Observe when gradients are clipped, and whether a `GradScaler` has still scaled them then."""

import functools
import math
import sys
import weakref

from .events import emit, guarded, line_of_script
from .processes import wrap
from .weights import number_of
from .windows import Backwards, gradients_of, holders_of, window_of

MOST_STEPS = 20  # of an optimizer, whose gradients are compared


class _Scaling:
    """The latest call of `GradScaler.scale`."""

    scaler: weakref.ref | None = None
    at_backwards = -1


def observe_torch(torch) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        observed = _observed_clip(getattr(torch.nn.utils, name))
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(owner, name, observed)
    wrap("scale", _scale, torch.amp.GradScaler)
    wrap("step", _scaled_step, torch.amp.GradScaler)


def _observed_clip(original):
    @functools.wraps(original)
    def clip(parameters, *args, **kwargs):
        if not isinstance(parameters, sys.modules["torch"].Tensor):
            parameters = list(parameters)  # a generator can be read only once
        limit = (*args, *kwargs.values(), 0)[0]
        _clipped(parameters, limit)
        return original(parameters, *args, **kwargs)

    return clip


@guarded
def _clipped(parameters, limit) -> None:
    if not math.isfinite(float(limit)):
        return  # the script asks for the norm only
    parameters = parameters if isinstance(parameters, list) else [parameters]
    for optimizer in holders_of(parameters):
        window = window_of(optimizer)
        window.is_clipped = True
        emit(
            "clip",
            optimizer=window.number,
            step=window.steps,
            backwards=Backwards.count,
            is_used=Backwards.count == window.backwards_at_step and window.steps > 0,
            scale=_scale_of(optimizer, window),
            gradients=number_of(gradients_of(optimizer)) if window.steps < MOST_STEPS else None,
            line=line_of_script(3),
        )


def _scale_of(optimizer, window) -> float:
    """Return the factor of a scaler by which the gradients are still multiplied."""
    scaler = _Scaling.scaler and _Scaling.scaler()
    if scaler is None or _Scaling.at_backwards < window.backwards_at_step:
        return 1.0
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    stage = state.get("stage", None)
    return 1.0 if stage is not None and stage.name != "READY" else scaler.get_scale()


@guarded
def _scale(scaler, *outputs) -> None:
    if scaler.is_enabled():
        _Scaling.scaler, _Scaling.at_backwards = weakref.ref(scaler), Backwards.count


@guarded
def _scaled_step(scaler, optimizer=None, *args) -> None:
    """A scaler skips the step if a gradient is infinite. The gradients are then not lost."""
    if optimizer is not None and scaler.is_enabled():
        window_of(optimizer).is_scaled = True

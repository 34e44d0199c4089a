"""Observe learning rate schedules."""

import functools

from .events import emit, guarded, line_of_script
from .weights import Numbers
from .windows import window_of

_schedulers = Numbers()
_depth = 0  # of calls of `step` within each other


def observe_torch(torch) -> None:
    module = torch.optim.lr_scheduler
    for each in vars(module).values():
        if isinstance(each, type) and "step" in vars(each):
            _observe_schedule(each)
    initial = module.LRScheduler._initial_step

    @functools.wraps(initial)
    def observed(self):
        global _depth
        _depth += 1
        try:
            return initial(self)
        finally:
            _depth -= 1
            _schedule_made(self)

    module.LRScheduler._initial_step = observed


@guarded
def _schedule_made(scheduler) -> None:
    emit(
        "schedule made",
        name=type(scheduler).__name__,
        optimizer=window_of(scheduler.optimizer).number,
        scheduler=_schedulers.of(scheduler),
        planned=_planned(scheduler),
        line=line_of_script(4),
    )


def _planned(scheduler) -> int | None:
    """Return the number of advances after which the schedule ends, or None if it has no end."""
    for name in ("total_steps", "T_max"):  # OneCycleLR, CosineAnnealingLR
        if isinstance(planned := getattr(scheduler, name, None), int):
            return planned
    is_linear = type(scheduler).__name__ == "LinearLR"
    has_end = type(scheduler).__name__ == "PolynomialLR" or (
        is_linear and scheduler.end_factor < scheduler.start_factor  # or it is a warm-up
    )
    if has_end:
        return scheduler.total_iters
    for function in getattr(scheduler, "lr_lambdas", []):  # of the schedules in transformers
        planned = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(planned, int):
            return planned
    return None


def _observe_schedule(owner) -> None:
    """Record the outermost call of `step`: schedules call each other."""
    original = owner.step

    @functools.wraps(original)
    def observed(self, *args, **kwargs):
        global _depth
        before = _position(self)
        _depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _depth -= 1
            if _depth == 0:
                _scheduled(self, before)

    owner.step = observed


def observe_accelerate(accelerate) -> None:
    _observe_schedule(accelerate.scheduler.AcceleratedScheduler)


def _position(scheduler) -> int:
    inner = getattr(scheduler, "scheduler", scheduler)  # Accelerate's wrapper
    if not hasattr(inner, "last_epoch") and getattr(inner, "_schedulers", []):
        return _position(inner._schedulers[0])  # ChainedScheduler
    return getattr(inner, "last_epoch", 0)


@guarded
def _scheduled(scheduler, before: int) -> None:
    inner = getattr(scheduler, "scheduler", scheduler)
    optimizer = getattr(inner, "optimizer", None)
    advanced = _position(scheduler) - before
    if optimizer is not None and advanced:
        emit(
            "schedule",
            scheduler=_schedulers.of(inner),
            name=type(inner).__name__,
            optimizer=window_of(optimizer).number,
            advanced=advanced,
            position=_position(scheduler),
            line=line_of_script(4),
        )

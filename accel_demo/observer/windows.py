"""What has happened to each optimizer since its last step."""

import itertools
import weakref

_windows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizer -> Window
_numbers = itertools.count()


class Backwards:
    """The number of backward passes so far, in this process."""

    count = 0


class Window:
    """What happened to one optimizer since its last step."""

    def __init__(self, number: int):
        self.number, self.steps = number, 0
        self.backwards_at_step = self.backwards_at_zero = 0
        self.gradients = 0  # a number that changes whenever a gradient does
        self.before: int | None = None  # the weights before the current step
        self.is_clipped = self.is_unscaled = False
        self.scale: float | None = None  # of the `GradScaler` that makes the step
        self.averaged: list[float] = []  # magnitudes of gradients that DDP has just averaged
        self.at_step: dict = {}  # the gradients right before the step, see training.py
        self.had_gradients: set[int] = set()  # IDs of parameters that had one before any step

    def reset(self) -> None:
        """Forget what happened before the step that has just been made."""
        self.backwards_at_step = self.backwards_at_zero = Backwards.count
        self.is_clipped = self.is_unscaled = False
        self.scale = None
        self.averaged = []
        self.steps += 1


def window_of(optimizer) -> Window:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # in the wrappers of Accelerate, Fabric
    if optimizer not in _windows:
        _windows[optimizer] = Window(next(_numbers))
    return _windows[optimizer]


def optimizers() -> list:
    return list(_windows)


def parameters_of(optimizer) -> list:
    return [each for group in optimizer.param_groups for each in group["params"]]


def used_parameters_of(optimizer, replicas: list) -> list:
    """Return the parameters that have had a gradient, or are in one of the replicas.

    Those with a gradient at one call are among the results of all later ones. The others may
    differ between the ranks without any effect, such as those of a layer that was replaced after
    the optimizer was created.
    """
    window, parameters = window_of(optimizer), parameters_of(optimizer)
    window.had_gradients |= {id(each) for each in parameters if each.grad is not None}
    used = window.had_gradients | {id(each) for one in replicas for each in one.parameters()}
    return [each for each in parameters if id(each) in used]


def gradients_of(optimizer) -> list:
    return [each.grad for each in parameters_of(optimizer) if each.grad is not None]


def holders_of(parameters) -> list:
    """Return the optimizers that hold at least one of the parameters."""
    held = {id(each) for each in parameters}
    return [each for each in optimizers() if any(id(one) in held for one in parameters_of(each))]

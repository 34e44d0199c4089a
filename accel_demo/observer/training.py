"""Observe backward passes, optimizer steps and `zero_grad`, and compare the weights.

Only class-level hooks and weak references: a hook on a model would be pickled and copied with it.
"""

import functools
import gc
import itertools
import sys
import weakref

from . import limits
from .collectives import counted
from .events import emit, guarded, line_of_script
from .loaders import fingerprints
from .processes import wrap

_optimizers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizer -> _Window
_state = {"backwards": 0, "forwards": [], "fsdp": False}
BEGINNING = 4096  # bytes of each parameter that are compared before a step
MOST_GRADIENTS = 20  # backward passes whose event contains a sum of the gradients
MOST_FORWARDS = 1000  # between two backward passes


class Numbers:
    """Numbers objects. The number of a deleted object is not used again."""

    def __init__(self):
        self._known, self._next = weakref.WeakKeyDictionary(), itertools.count()

    def of(self, each) -> int:
        if each not in self._known:
            self._known[each] = next(self._next)
        return self._known[each]

    def known(self, each) -> int | None:
        return self._known.get(each)


class _Window:
    """What happened to one optimizer since its last step."""

    def __init__(self, number: int):
        self.number, self.steps, self.is_scaled = number, 0, False
        self.backwards_at_step = self.backwards_at_zero = 0
        self.gradients = 0  # a number that changes whenever a gradient does
        self.before: int | None = None  # the weights before the current step


_replicas = Numbers()
_optimizer_numbers = itertools.count()
_stepping: list = []  # optimizers whose `step` is running, the outermost first


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
        result = backward(*args, **kwargs)
        _backward_done(before)
        return result

    torch.autograd.backward = observed_backward
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        wrap("zero_grad", _zeroed, owner)
    wrap("step", _scaled, torch.amp.GradScaler)
    _observe_construction(torch.optim.Optimizer, _constructed)
    if torch.distributed.is_available():
        replica = torch.nn.parallel.DistributedDataParallel
        wrap("_pre_forward", _forward, replica)
        _observe_construction(replica, _wrapped)
        wrap("__enter__", _joined, torch.distributed.algorithms.join.Join)


def _observe_construction(owner, after) -> None:
    original = owner.__init__

    @functools.wraps(original)
    def construct(self, *args, **kwargs):
        original(self, *args, **kwargs)
        after(self)

    owner.__init__ = construct


@guarded
def _wrapped(replica) -> None:
    total = _total(_sums(list(replica.parameters())))
    emit("wrapped", total=total, ranks=replica.process_group.size(), line=line_of_script(4))


@guarded
def _constructed(optimizer) -> None:
    if not _stepping:
        emit("optimizer", optimizer=window_of(optimizer).number, line=line_of_script(4))


@guarded
def _joined(join) -> None:
    emit("join", line=line_of_script(4))


@guarded
def _forward(replica, *inputs) -> None:
    torch = sys.modules["torch"]
    number = _replicas.of(replica)
    if torch.is_grad_enabled() and len(_state["forwards"]) < MOST_FORWARDS:
        samples = fingerprints(inputs)
        _state["forwards"].append([number, bool(replica.require_backward_grad_sync), samples])


@guarded
def _backward_done(before: list[int] | None) -> None:
    number = _state["backwards"] = _state["backwards"] + 1
    forwards, _state["forwards"] = _state["forwards"], []
    is_local = before is not None and before == counted()
    emit(
        "backward",
        number=number,
        line=line_of_script(4),
        replicas=[[number, synchronized] for number, synchronized, _ in forwards],
        samples=forwards[-1][2] if forwards else [],
        gradients=_sum_of_gradients() if is_local and number <= MOST_GRADIENTS else 0,
    )


def _sum_of_gradients() -> int:
    """Return a number of the gradients of all optimizers, as `_sums` does; 0 without any."""
    held = [each for optimizer in list(_optimizers) for each in _parameters_of(optimizer)]
    sums = _sums([each.grad for each in held if each.grad is not None])
    return hash(tuple(sums)) if sums and any(sums) else 0


def window_of(optimizer) -> _Window:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # in the wrappers of Accelerate, Fabric
    if optimizer not in _optimizers:
        _optimizers[optimizer] = _Window(next(_optimizer_numbers))
    return _optimizers[optimizer]


def _parameters_of(optimizer) -> list:
    return [each for group in optimizer.param_groups for each in group["params"]]


@guarded
def _before_step(optimizer, args, kwargs) -> None:
    if optimizer in _stepping:  # its last step has raised an error
        del _stepping[_stepping.index(optimizer) :]
    _stepping.append(optimizer)
    if len(_stepping) > 1:  # an optimizer in an optimizer, such as ZeroRedundancyOptimizer
        return
    window = window_of(optimizer)
    limits.end_run_after(window.steps)
    parameters = _parameters_of(optimizer)
    window.before = _total(_sums(parameters, most=BEGINNING))
    if window.steps == 0:
        shapes = [list(each.shape) for each in parameters]
        emit("weights", optimizer=window.number, sums=_sums(parameters), shapes=shapes)
    if window.steps & (window.steps - 1) == 0:  # before the steps 0, 1, 2, 4, 8, …
        emit("models", models=_models(), optimizer=window.number)


@guarded
def _after_step(optimizer, args, kwargs) -> None:
    del _stepping[_stepping.index(optimizer) :]
    if _stepping:
        return
    window, parameters = window_of(optimizer), _parameters_of(optimizer)
    emit(
        "step",
        optimizer=window.number,
        name=type(optimizer).__name__,
        number=window.steps,
        line=line_of_script(4),
        backwards=_state["backwards"] - window.backwards_at_step,
        before=window.before,
        total=_total(_sums(parameters)),
        parameters=len(parameters),
        without_gradient=[n for n, each in enumerate(parameters) if each.grad is None],
    )
    window.steps += 1
    window.backwards_at_step = window.backwards_at_zero = _state["backwards"]
    window.gradients = _gradients(optimizer)
    window.is_scaled = False


def _total(sums: list[int] | None) -> int | None:
    return None if sums is None else hash(tuple(sums))


def _sums(tensors, most: int | None = None) -> list[int] | None:
    """Return a number per tensor, of its first `most` bytes. Different bits change it, as a rule.

    Returns None if the tensors are shards of larger ones, because ranks may then differ.
    """
    torch = sys.modules["torch"]
    sums = []
    for tensor in tensors:
        is_flat = _state["fsdp"] or getattr(tensor, "_is_flat_param", False)
        if is_flat or type(tensor.data) is not torch.Tensor:  # for example a DTensor
            return None
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        in_memory = tensor.detach().permute(by_stride)  # also channels_last, without a copy
        content = in_memory.contiguous().view(-1).view(torch.uint8)[:most]
        whole = len(content) // 8 * 8
        value = content[:whole].view(torch.int64).sum().item() if whole else 0
        sums.append(value ^ int(content[whole:].long().sum()) if whole < len(content) else value)
    return sums


def _gradients(optimizer) -> int:
    return sum(
        each.grad._version + 1 for each in _parameters_of(optimizer) if each.grad is not None
    )


def _are_finite(optimizer) -> bool:
    return all(
        each.grad.isfinite().all() for each in _parameters_of(optimizer) if each.grad is not None
    )


@guarded
def _zeroed(owner, *args) -> None:
    """Record gradients that are set to zero before a step has used them.

    A step may call it for a closure, and a script may skip gradients that are not finite.
    """
    torch = sys.modules["torch"]
    if _stepping:
        return
    if isinstance(owner, torch.optim.Optimizer):
        owners = [owner]
    else:
        held = {id(each) for each in owner.parameters()}
        owners = [
            optimizer
            for optimizer in list(_optimizers)
            if any(id(each) in held for each in _parameters_of(optimizer))
        ]
    for optimizer in owners:
        window, gradients = window_of(optimizer), _gradients(optimizer)
        thrown = _state["backwards"] - window.backwards_at_zero
        is_new = thrown and gradients != window.gradients and not window.is_scaled
        if is_new and _are_finite(optimizer):
            emit("thrown", optimizer=window.number, backwards=thrown, line=line_of_script(4))
        window.backwards_at_zero = _state["backwards"]
        window.gradients = 0


@guarded
def _scaled(scaler, optimizer=None, *args) -> None:
    """A scaler skips the step if a gradient is infinite. The gradients are then not lost."""
    if optimizer is not None and scaler.is_enabled():
        window_of(optimizer).is_scaled = True


def _models() -> list[dict]:
    """Return all models of this process, found among Python's objects."""
    torch = sys.modules["torch"]
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    parts = {id(part) for module in modules for part in module.children()}
    holders: dict[int, int] = {}
    for optimizer, window in list(_optimizers.items()):
        holders |= {id(each): window.number for each in _parameters_of(optimizer)}
    models = []
    for module in modules:
        parameters = list(module.named_parameters())
        if id(module) in parts or not parameters:
            continue
        models.append(
            {
                "class": type(module).__name__,
                "inner": type(getattr(module, "module", None)).__name__,
                "replica": _replicas.known(module),
                "parameters": [
                    [name, holders.get(id(each)), each.requires_grad, each.grad is not None]
                    for name, each in parameters
                ],
            }
        )
    return models


def observe_fsdp(module) -> None:
    """Notice FullyShardedDataParallel: with `use_orig_params`, its shards look like tensors."""
    wrap("__init__", lambda *_: _state.update(fsdp=True), module.FullyShardedDataParallel)


def observe_tensor_parallel(module) -> None:
    wrap("parallelize_module", lambda *_: _divided(), module)


@guarded
def _divided() -> None:
    emit("tensor parallel", line=line_of_script(5))


def observe_accelerate(accelerate) -> None:
    wrap("prepare", _prepared, accelerate.Accelerator)


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

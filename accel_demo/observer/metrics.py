"""Observe evaluations: when a model is set to `eval`, and what Accelerate gathers."""

import functools
import re
import sys
from collections.abc import Mapping

from .events import emit, guarded, is_own_file, line_of_script
from .loaders import number_of
from .processes import wrap

MOST_EVENTS = 2000  # of each kind
MOST_TENSORS = 100  # that are gathered at once
_emitted = {"eval": 0, "gathered": 0, "message": 0, "printed": 0}
_NUMBER = re.compile(r"\d\.\d|\d ?%|\d of \d")


def observe_torch(torch) -> None:
    wrap("eval", _evaluates, torch.nn.Module)


def observe_accelerate(accelerate) -> None:
    for name in ("gather", "gather_for_metrics"):
        _observe_gather(accelerate.Accelerator, name)


def observe_groups(module) -> None:
    """Notice messages between two ranks: with gloo, the Flight Recorder does not record them."""
    for name in ("send", "isend"):
        wrap(name, _sends, module, sys.modules["torch.distributed"])
    for name in ("set", "add", "append"):
        wrap(name, _stores, module.Store)


def observe_output() -> None:
    """Notice that a number is printed, which may be a metric."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        wrap("write", _prints, stream)


def observe_processes(module) -> None:
    """Notice a process that may return its results through shared memory or a queue."""
    wrap("_bootstrap", _begun, module.BaseProcess)


def _emit(kind: str, **fields) -> None:
    _emitted[kind] += 1
    if _emitted[kind] <= MOST_EVENTS:
        emit(kind, **fields)


@guarded
def _evaluates(model) -> None:
    _emit("eval", line=line_of_script(4))


def _observe_gather(owner, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def observed(self, *args, **kwargs):
        _gathers(self, name, [*args, *kwargs.values()])
        return original(self, *args, **kwargs)

    setattr(owner, name, observed)


@guarded
def _gathers(accelerator, name: str, values: list) -> None:
    """Record a call by the script itself. Libraries call `gather`, too."""
    if values and is_own_file(sys._getframe(3).f_code.co_filename):
        state = accelerator.gradient_state
        _emit(
            "gathered",
            name=name,
            sizes=[list(each.shape) for each in _tensors(values[0])],
            has_ids=any(map(_may_be_ids, _tensors(values[0]))),
            loader=number_of(state.active_dataloader),
            is_last=state.end_of_dataloader,
            line=line_of_script(3),
        )


def _tensors(value) -> list:
    """Return all tensors in a value."""
    torch, tensors, waiting = sys.modules["torch"], [], [value]
    for _ in range(MOST_TENSORS):
        if not waiting:
            break
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            tensors.append(each)
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif isinstance(each, Mapping):
            waiting += each.values()
    return tensors


def _may_be_ids(tensor) -> bool:
    """Return True if a tensor has a different integer for each sample."""
    is_list = tensor.dim() == 1 and len(tensor) > 1 and not tensor.is_floating_point()
    return is_list and len(tensor.unique()) == len(tensor)


@guarded
def _sends(*_) -> None:
    if not _emitted["message"]:
        _emit("message", line=line_of_script(4))


@guarded
def _stores(*_) -> None:
    """Notice a value that the script itself passes on in a store. Libraries do so to connect."""
    if is_own_file(sys._getframe(3).f_code.co_filename):
        _sends()


@guarded
def _prints(text, *_) -> None:
    is_progress = "\r" in text  # of a bar
    if not is_progress and _NUMBER.search(text):
        _emit("printed")


@guarded
def _begun(process, *_) -> None:
    target = getattr(process, "_target", None)
    if getattr(target, "__module__", "").startswith("torch.utils.data"):
        return  # a loader worker
    values = [*process._args, *process._kwargs.values()]
    values += [each for value in values if isinstance(value, tuple) for each in value]  # mp.spawn
    modules = [type(value).__module__ for value in values]
    if any(name == "torch" or name.startswith(("multiprocessing", "ctypes")) for name in modules):
        emit("shared")

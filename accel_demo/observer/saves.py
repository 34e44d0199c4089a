"""Observe which models, and under which names their tensors, are saved."""

import sys
from collections.abc import Mapping

from .events import emit, guarded, line_of_script
from .models import replicas
from .processes import wrap

PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, of torch.compile
MOST_VALUES = 1000  # of an object that is saved
# Functions that load the names with the prefixes, too
_OWN_FORMATS = {"save_accelerator_state", "save_fsdp_model"}


def observe_torch(torch) -> None:
    wrap("save", _saved, torch, torch.serialization)


def observe_safetensors(module) -> None:
    for name in ("save_file", "save_model"):
        wrap(name, _saved, module)


@guarded
def _saved(content=None, *_) -> None:
    prefix, whole = _find(content)
    if (prefix or whole) and not _is_in_own_format():
        emit("model saved", prefix=prefix, whole=whole, line=line_of_script(3))


def _find(content) -> tuple[str, str]:
    """Return the prefix of the names of a saved state, and the class of a model saved whole."""
    torch = sys.modules["torch"]
    waiting, seen = [content], 0
    while waiting and seen < MOST_VALUES:
        value, seen = waiting.pop(), seen + 1
        if isinstance(value, torch.nn.Module):
            return "", type(value).__name__
        if isinstance(value, Mapping):
            for prefix in PREFIXES:
                if _has_prefix(value, prefix):
                    return prefix, ""
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
    return "", ""


def _has_prefix(state: Mapping, prefix: str) -> bool:
    """Return True if all names of a state begin with a prefix, and a wrapper has added it."""
    names = list(state)
    if not names or not all(isinstance(name, str) and name.startswith(prefix) for name in names):
        return False
    if prefix != "module.":
        return True
    inner = [replica.module.named_parameters() for replica in replicas.objects()]
    return any(f"module.{name}" in state for named in inner for name, _ in named)


def _is_in_own_format() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in _OWN_FORMATS:
            return True
        frame = frame.f_back
    return False

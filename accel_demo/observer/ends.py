"""Observe how this process ends."""

import atexit
import functools
import sys
import traceback

from . import collectives
from .events import emit, guarded, is_own_file


def watch() -> None:
    atexit.register(_ended)


@guarded
def _ended() -> None:
    """Record the end, with the error that Python has printed, if any."""
    error = getattr(sys, "last_value", None)
    if error is not None or "torch" in sys.modules:
        collectives.record()
        emit("end", error=describe(error))


def describe(error: BaseException | None) -> dict | None:
    """Return the type, the message and the script's lines of an error, outermost first.

    `sys.exit(0)` is no error.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return None
    places = [
        [place.filename, place.lineno, place.name]
        for place in traceback.extract_tb(error.__traceback__)
        if is_own_file(place.filename)
    ]
    return {"type": type(error).__name__, "message": str(error)[:2000], "places": places}


def observe_spawn(module) -> None:
    """mp.spawn catches the errors of its processes. It starts `_wrap`, pickled by its name."""
    original = module._wrap

    @functools.wraps(original)
    def wrapped(function, index, *args):
        emit("spawned", index=index)
        original(_Reporting(function), index, *args)

    module._wrap = wrapped


class _Reporting:
    """A function that records its error before it raises it."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        try:
            self.function(*args)
        except BaseException as error:
            _failed(error)
            raise
        else:
            _returned()


@guarded
def _failed(error) -> None:
    collectives.record()
    emit("end", error=describe(error))


@guarded
def _returned() -> None:
    collectives.record()
    emit("end", error=None)

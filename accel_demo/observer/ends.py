"""Observe how this process ends."""

import atexit
import builtins
import functools
import os
import sys
import traceback

from . import collectives
from .events import emit, guarded, is_own_file
from .imports import when_imported

before_end: list = []  # functions to call before the end is recorded
_ended: set[int] = set()  # the ID of this process if its end was recorded


def watch() -> None:
    atexit.register(lambda: _end(getattr(sys, "last_value", None)))
    when_imported("multiprocessing.process", observe_processes)
    functions: list[tuple] = [(sys, "exit")]
    if hasattr(builtins, "exit"):  # not with python -S
        functions.append((type(builtins.exit), "__call__"))
    for owner, name in functions:
        setattr(owner, name, _recording(getattr(owner, name)))


def _recording(leave):
    """Record each call of `sys.exit` or `exit`: Python keeps no SystemExit until the end.

    The script may still catch it.
    """

    @functools.wraps(leave)
    def observed(*args, **kwargs):
        try:
            leave(*args, **kwargs)
        except SystemExit as error:
            _leaving(error)
            raise

    return observed


@guarded
def _leaving(error: SystemExit) -> None:
    if "torch" in sys.modules and os.getpid() not in _ended:
        threading = sys.modules["threading"]
        if threading.current_thread() is threading.main_thread():
            emit("exit", error=describe(error))


@guarded
def _end(error: BaseException | None) -> None:
    """Record the end, with its error, if any."""
    if (error is not None or "torch" in sys.modules) and os.getpid() not in _ended:
        for function in before_end:
            function()
        collectives.record()
        emit("end", error=describe(error))
        _ended.add(os.getpid())


def describe(error: BaseException | None) -> dict | None:
    """Return the type, the message and the script's lines of an error, outermost first.

    `sys.exit(0)` is no error. If the script has caught an error and calls `sys.exit(1)`, return the
    first error.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, SystemExit):
        caught = describe(error.__context__)
        if caught and caught["places"]:
            return caught
        # The error has only just been raised: add the frames that it will pass.
        frames = [*list(traceback.walk_stack(frames[0][0].f_back))[::-1], *frames]
    places = [
        [frame.f_code.co_filename, line, frame.f_code.co_name]
        for frame, line in frames
        if is_own_file(frame.f_code.co_filename)
    ]
    return {"type": type(error).__name__, "message": str(error)[:2000], "places": places}


def observe_processes(module) -> None:
    """multiprocessing calls neither sys.excepthook nor, in forked processes, atexit."""
    original = module.BaseProcess._bootstrap

    @functools.wraps(original)
    def bootstrap(self, *args, **kwargs):
        self.run = _reporting(self, self.run)  # a subclass may have its own method
        return original(self, *args, **kwargs)

    module.BaseProcess._bootstrap = bootstrap


def _reporting(process, run):
    """Return `run` with a record of its end.

    The processes of mp.spawn run `_wrap(function, index, …)`. It catches errors and calls sys.exit.
    """

    def observed():
        target = process._target
        if getattr(target, "__module__", "") == "torch.multiprocessing.spawn":
            _spawned(process._args[1])
        try:
            run()
        except BaseException as error:
            _end(error)
            raise
        _end(None)

    return observed


@guarded
def _spawned(index: int) -> None:
    emit("spawned", index=index)

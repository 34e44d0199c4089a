"""Observe the profilers that the script uses itself, and end all ranks before the same step.

If a rank ended before the others, their collectives would fail. Usually, all ranks profile the same
steps. But often only rank 0 of a script uses a profiler, and our profile of this rank waits for it.
"""

import functools
import gzip
import os
import shutil

from .events import emit, guarded, path_of

PROFILES, DONE = ".profiles", ".done"  # endings of empty files that all ranks look for


def observe_torch(torch, around) -> None:
    """`around` is that of tracing.py."""
    profile = torch.autograd.profiler.profile
    around(profile, "_prepare_trace", _prepares)
    around(profile, "__exit__", _exits)
    around(torch.profiler.profile, "__init__", _creates)
    around(torch.profiler.profile, "stop", _stops)
    around(torch.profiler._KinetoProfile, "export_chrome_trace", _exports)


@functools.partial(guarded, also_if_muted=True)
def may_end(steps: int, done_after: int, processes: int) -> bool:
    """Return True if this rank, which was done after `done_after` steps, may end after `steps`.

    If a rank has its own profiler, all ranks end after the step in which the last one was done.
    They see this in the same step, because a rank that is done before a step has announced it
    before any other rank can complete the step, and so reach the next one.
    """
    folder = os.path.dirname(path_of(""))
    if not any(name.endswith(PROFILES) for name in os.listdir(folder)):
        return True
    _create(f"{done_after}{DONE}")
    done = [int(name.split(".")[1]) for name in os.listdir(folder) if name.endswith(DONE)]
    return sum(each < steps for each in done) >= processes


@guarded
def _announce() -> None:
    _create(PROFILES[1:])


def _create(name: str) -> None:
    open(path_of(name), "ab").close()


def _prepares(tracer, call, *profiler):
    if not tracer.is_changing:
        _announce()
        tracer.give_way()
    return call()


def _exits(tracer, call, *arguments):
    result = call()
    if tracer.profiler is None:
        tracer.own_is_active = False
    return result


def _creates(tracer, call, *arguments):
    if not tracer.is_changing:
        _announce()
        tracer.own_profilers += 1
    return call()


def _stops(tracer, call, profiler):
    tracer.own_profilers -= profiler is not tracer.profiler and not tracer.is_changing
    return call()


def _exports(tracer, call, profiler, path, *arguments):
    result = call()
    if path != tracer.path and not tracer.is_over:
        tracer.own_traces += 1
        _copy(tracer, path)
    return result


@guarded
def _copy(tracer, path) -> None:
    """Copy a trace that the script has written."""
    copy = path_of(f"own-{tracer.own_traces}.trace")
    source = gzip.open(path) if str(path).endswith(".gz") else open(path, "rb")
    with source, open(copy, "wb") as target:
        shutil.copyfileobj(source, target)
    emit("own trace", trace=copy, path=os.path.abspath(path), steps=tracer.steps_ended)

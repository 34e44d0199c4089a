"""Record when a process of a node joins a process group, makes an Accelerator, or trains.

`keeper.py` puts this folder on PYTHONPATH, and Python imports a module called `sitecustomize` at
startup. It works in any Python process of the node, even in one without accel_demo, and changes
nothing but the functions that it watches. `members.py` reads the log, one JSON object per line.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

LOG = "ACCEL_DEMO_NODE_LOG"  # path of the log; members.py has the same name
has_trained = False


def record(event: str, details: "Callable[[], dict]" = dict) -> None:
    """Write a line to the log. `details` returns its other values. Errors are never raised."""
    try:
        line = json.dumps({"pid": os.getpid(), "event": event, **details()}) + "\n"
        file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line.encode())  # appending is atomic
        finally:
            os.close(file)
    except Exception:
        pass


def watch_groups(module) -> None:
    """Record each call of `init_process_group` before it begins, and how it ends."""
    import inspect  # only here, because it would slow down the start of every program

    original = module.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        record("joins", lambda: requested_place(signature, args, kwargs))
        try:
            original(*args, **kwargs)
        except BaseException:
            record("fails to join")
            raise
        record(
            "has joined",
            lambda: {"rank": module.get_rank(), "world_size": module.get_world_size()},
        )

    module.init_process_group = init_process_group


def requested_place(signature, args, kwargs) -> dict:
    """Return the rank and world size that a call of `init_process_group` asks for.

    They come from its arguments, or from the variables of a launcher. Returns an empty dictionary
    if they come from somewhere else.
    """
    try:
        arguments = signature.bind(*args, **kwargs).arguments
        place = {name: int(arguments.get(name, -1)) for name in ("rank", "world_size")}
        if arguments.get("init_method") in (None, "env://") and arguments.get("store") is None:
            for name in [name for name, value in place.items() if value == -1]:
                place[name] = int(os.environ[name.upper()])
    except (TypeError, KeyError, ValueError):
        return {}
    return {} if -1 in place.values() else place


def watch_accelerators(module) -> None:
    """Record how the first Accelerator was made, and how many processes it is connected to."""
    original = module.AcceleratorState.__init__
    accelerator = module.AcceleratorState._shared_state  # empty until there is one
    connection = module.PartialState._shared_state

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        is_first = kwargs.get("_from_accelerator") and not accelerator
        is_plain = not kwargs.get("cpu") and not connection
        original(self, *args, **kwargs)
        if is_first:
            details = {"is_plain": is_plain, "num_processes": self.num_processes}
            record("makes an Accelerator", lambda: details)

    module.AcceleratorState.__init__ = __init__


def watch_optimizers(module) -> None:
    """Record the first step of any optimizer."""

    def after_step(optimizer, args, kwargs):
        import torch

        global has_trained
        if not torch.compiler.is_compiling() and not has_trained:
            has_trained = True
            record("trains")

    module.register_optimizer_step_post_hook(after_step)


WATCHED = {
    "torch.distributed.distributed_c10d": watch_groups,
    "torch.optim.optimizer": watch_optimizers,
    "accelerate.state": watch_accelerators,
}


class Finder:
    """Watch a module as soon as it has been imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in WATCHED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            try:
                WATCHED[name](module)
            except AttributeError:  # a version without this function
                pass

        spec.loader.exec_module = exec_module
        return spec


def import_next() -> None:
    """Import the `sitecustomize` that Python would import without this folder."""
    folder = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if path != folder]
    spec = PathFinder.find_spec("sitecustomize")
    if spec and spec.loader:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, Finder)
import_next()

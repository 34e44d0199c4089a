"""Observe which processes connect and train, and what `Accelerator` says."""

import functools
import os
import sys

from .events import emit, guarded, line_of_script

connections = 0  # of this process, in all
_trained: set[int] = set()  # the IDs of the processes whose first step was recorded


def wrap(name: str, before, *owners) -> None:
    """Call `before` with the positional arguments of each call of a function of the owners."""
    original = getattr(owners[0], name)

    @functools.wraps(original)
    def observed(*args, **kwargs):
        before(*args)
        return original(*args, **kwargs)

    for owner in owners:
        setattr(owner, name, observed)


def observe_groups(module) -> None:
    """Record each call of `init_process_group` before it begins, and how it ends.

    `module` is torch.distributed.distributed_c10d. If it has only just been imported, all others
    that import the function from it, such as torch.distributed.device_mesh, are observed, too.
    """
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        _connecting(original, args, kwargs)
        try:
            original(*args, **kwargs)
        except BaseException:
            _not_connected()
            raise
        _connected()

    for owner in (module, sys.modules["torch.distributed"]):
        vars(owner).update(init_process_group=init_process_group)


def _arguments(function, args, kwargs) -> dict:
    """Return the arguments of a call by name, or an empty dictionary if they are invalid."""
    import inspect  # slow, and torch has already imported it

    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}


@guarded
def _connecting(function, args, kwargs) -> None:
    rank, world = _requested_place(_arguments(function, args, kwargs))
    emit("connecting", rank=rank, world=world, line=line_of_script(3))


def _requested_place(arguments: dict) -> tuple[int | None, int | None]:
    """Return the rank and world size that a call of `init_process_group` asks for.

    They come from its arguments, or from the variables of a launcher. They are None if they come
    from somewhere else.
    """
    place = {name: arguments.get(name, -1) for name in ("rank", "world_size")}
    if arguments.get("init_method") in (None, "env://") and arguments.get("store") is None:
        for name in [name for name, value in place.items() if value == -1]:
            place[name] = os.environ.get(name.upper(), -1)
    try:
        rank, world = int(place["rank"]), int(place["world_size"])
    except (TypeError, ValueError):
        return None, None
    return (None, None) if -1 in (rank, world) else (rank, world)


@guarded
def _not_connected() -> None:
    emit("not connected", line=line_of_script(3))


@guarded
def _connected() -> None:
    global connections
    connections += 1
    dist = sys.modules["torch.distributed"]
    emit(
        "connected",
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        line=line_of_script(3),
    )


def observe_first_step(torch) -> None:
    """Record the first step of any optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer, args, kwargs):
        if not torch.compiler.is_compiling() and os.getpid() not in _trained:
            _trained.add(os.getpid())
            _first_step()

    register_optimizer_step_post_hook(stepped)


@guarded
def _first_step() -> None:
    emit("step", line=line_of_script(4))


def observe_accelerate(accelerate) -> None:
    original = accelerate.Accelerator.__init__
    connection = accelerate.state.PartialState._shared_state  # empty until there is one

    @functools.wraps(original)
    def construct(self, *args, **kwargs):
        is_plain = not connection and not _arguments(original, (self, *args), kwargs).get("cpu")
        original(self, *args, **kwargs)
        _constructed(self, is_plain)

    accelerate.Accelerator.__init__ = construct


@guarded
def _constructed(accelerator, is_plain: bool) -> None:
    emit(
        "accelerator",
        processes=accelerator.num_processes,
        is_plain=is_plain,
        line=line_of_script(4),
    )

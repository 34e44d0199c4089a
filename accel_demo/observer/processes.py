"""Observe which processes connect, what `Accelerator` says, and answer the audit's questions."""

import faulthandler
import functools
import json
import os
import sys
import threading
import traceback

from . import collectives
from .events import emit, guarded, is_muted, line_of_script, path_of


def observe_torch(torch) -> None:
    if not torch.distributed.is_available():
        return
    for name, before, after in (
        ("init_process_group", _connecting, _connected),
        ("destroy_process_group", collectives.record, None),
    ):
        original = getattr(torch.distributed, name)
        wrapped = _with_hooks(original, before, after)
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            setattr(module, name, wrapped)


def _with_hooks(original, before, after):
    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        before()
        result = original(*args, **kwargs)
        if after is not None:
            after()
        return result

    return wrapped


@guarded
def _connecting() -> None:
    emit("connecting", line=line_of_script(3))
    answer_questions()


@guarded
def _connected() -> None:
    collectives.connected()
    dist = sys.modules["torch.distributed"]
    emit(
        "connected",
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        backend=dist.get_backend(),
        line=line_of_script(3),
    )


def answer_questions() -> None:
    """Start a thread that answers the audit, even while the main thread waits in a collective.

    The thread does not poll: it is blocked until the audit writes to a named pipe.
    """
    if not os.path.exists(path_of("ask")):
        os.mkfifo(path_of("ask"), 0o600)
        faulthandler.enable(open(path_of("crash"), "w"))
        threading.Thread(target=_answer, name="accel-demo audit", daemon=True).start()


def _answer() -> None:
    while True:
        with open(path_of("ask")) as pipe:
            if not pipe.read() or is_muted():
                return
        answer = {"collectives": collectives.recent(), "stacks": _stacks()}
        with open(path_of("answer.part"), "w") as file:
            json.dump(answer, file, default=str)
        os.replace(path_of("answer.part"), path_of("answer"))


def _stacks() -> list:
    """Return the stacks of all other threads, the main one first, innermost frames first."""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    ordered = sorted(frames, key=lambda thread: thread != main)
    return [
        [[place.filename, place.lineno, place.name] for place in traceback.extract_stack(frame)][
            ::-1
        ]
        for frame in map(frames.get, ordered)
    ]


def observe_accelerate(accelerate) -> None:
    original, prepare = accelerate.Accelerator.__init__, accelerate.Accelerator.prepare

    @functools.wraps(original)
    def construct(self, *args, **kwargs):
        original(self, *args, **kwargs)
        _constructed(self)

    @functools.wraps(prepare)
    def prepare_all(self, *args, **kwargs):
        _prepared(args)
        return prepare(self, *args, **kwargs)

    accelerate.Accelerator.__init__, accelerate.Accelerator.prepare = construct, prepare_all


@guarded
def _constructed(accelerator) -> None:
    emit(
        "accelerator",
        processes=accelerator.num_processes,
        distributed_type=str(accelerator.distributed_type),
        device=str(accelerator.device),
        accumulation=accelerator.gradient_accumulation_steps,
        line=line_of_script(4),
    )


@guarded
def _prepared(objects) -> None:
    torch = sys.modules["torch"]
    names = {
        "model": torch.nn.Module,
        "optimizer": torch.optim.Optimizer,
        "loader": torch.utils.data.DataLoader,
        "scheduler": torch.optim.lr_scheduler.LRScheduler,
    }
    kinds = [name for each in objects for name, kind in names.items() if isinstance(each, kind)]
    emit("prepared", kinds=kinds, line=line_of_script(4))

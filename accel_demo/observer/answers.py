"""Answer the audit's questions: what is this process waiting for?"""

import faulthandler
import json
import os
import sys
import threading
import traceback

from . import collectives
from .events import guarded, is_muted, path_of
from .processes import wrap


def observe_groups(module) -> None:
    owners = module, sys.modules["torch.distributed"]
    wrap("init_process_group", lambda *_: answer_questions(), *owners)
    wrap("destroy_process_group", lambda *_: collectives.record(), *owners)


@guarded
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

"""Answer the audit's questions: what is this process waiting for?"""

import faulthandler
import json
import os
import sys
import threading
import traceback

from . import collectives
from .events import LIBRARIES, emit, guarded, is_muted, is_own_file, path_of, script_folder
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
        emit("libraries", libraries=LIBRARIES, script_folder=script_folder())  # to read the crash
        faulthandler.enable(open(path_of("crash"), "wb"))
        threading.Thread(target=_answer, name="accel-demo audit", daemon=True).start()


def _answer() -> None:
    while True:
        with open(path_of("ask"), encoding="utf-8") as pipe:
            if not pipe.read() or is_muted():
                return
        stack = _stack()
        own = next((place for place in stack if is_own_file(place[0])), None)
        answer = {"collectives": collectives.recent(), "stack": stack, "line": own}
        with open(path_of("answer.part"), "w", encoding="utf-8") as file:
            json.dump(answer, file, default=str)
        os.replace(path_of("answer.part"), path_of("answer"))


def _stack() -> list:
    """Return the stack of the main thread as [file, line, function], innermost frame first."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return [[each.filename, each.lineno, each.name] for each in traceback.extract_stack(frame)][
        ::-1
    ]

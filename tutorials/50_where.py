"""Run a script, and print its line and its collective every N seconds, and when it fails.

torchrun --standalone --nproc-per-node 2 tutorials/50_where.py 60 train.py --its-own options
"""

import linecache
import os
import pickle
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

MAIN = threading.main_thread().ident
PYTHON = os.path.dirname(os.__file__)


def line_in(script: str, stack: traceback.StackSummary) -> str:
    """Return the innermost line of a stack that belongs neither to Python nor to a package."""
    own = [frame for frame in stack if is_own(frame.filename)]
    if not own:
        return "not in the script"
    name, number = own[-1].filename, own[-1].lineno
    line = linecache.getline(name, number).strip()
    is_script = Path(name).resolve() == Path(script).resolve()
    return f"{'' if is_script else f'{os.path.relpath(name)} '}line {number} {line}"


def is_own(name: str) -> bool:
    """Say whether a source file is neither a part of Python nor of an installed package."""
    is_installed = name.startswith((PYTHON, "<")) or "site-packages" in name
    return not is_installed and Path(name).name != Path(__file__).name


def last_collective() -> str:
    """Return the number and the name of the last collective that this process has called."""
    recorders = torch._C._distributed_c10d
    dumps = [recorders._dump_fr_trace(True, False, False)]  # gloo's collectives
    if dist.is_nccl_available():
        dumps.append(recorders._dump_nccl_trace(True, False, False))
    calls = [call for dump in dumps for call in pickle.loads(dump)["entries"] if not call["is_p2p"]]
    if not calls:
        return "no collective"
    last = max(calls, key=lambda call: call["time_created_ns"])
    name, group = last["profiling_name"].split(":")[-1], last["process_group"][0]
    of_group = "" if group == "0" else f" of group {group}"
    return f"collective {last['collective_seq_id']}{of_group}: {name}"


def report(script: str, error: BaseException | None = None) -> None:
    """Print where the main thread is, or where it has failed."""
    if error:
        stack = traceback.extract_tb(error.__traceback__)
    else:
        stack = traceback.extract_stack(sys._current_frames()[MAIN])
    collective = last_collective() if dist.is_initialized() else "not connected"
    rank = os.environ.get("RANK", "?")
    # A single write, so that the lines of two ranks don't run together.
    sys.stdout.write(f"rank {rank}: {line_in(script, stack)}, {collective}\n")
    sys.stdout.flush()


def report_again_and_again(script: str, seconds: float) -> None:
    while True:
        time.sleep(seconds)
        report(script)


if __name__ == "__main__":
    seconds, script, *options = sys.argv[1:]
    sys.argv = [script, *options]
    script = str(Path(script).resolve())  # because the script may change the current folder
    sys.path[0] = str(Path(script).parent)  # as `python train.py` does
    reporter = threading.Thread(target=report_again_and_again, args=(script, float(seconds)))
    reporter.daemon = True
    reporter.start()
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):  # not for sys.exit(0)
            report(script, error)
        raise

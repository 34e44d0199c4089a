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


def line_in(script: str, stack: traceback.StackSummary) -> str:
    """Return the innermost line of a stack that is in the script or in a file beside it."""
    path = Path(script).resolve()
    own = [frame for frame in stack if Path(frame.filename).resolve().parent == path.parent]
    if not own:
        return "not in the script"
    file = Path(own[-1].filename).resolve()
    line = linecache.getline(own[-1].filename, own[-1].lineno).strip()
    return f"{'' if file == path else f'{file.name} '}line {own[-1].lineno} {line}"


def last_collective() -> str:
    """Return the number and the name of the last collective that this process has called."""
    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))
    calls = [call for call in record["entries"] if not call["is_p2p"]]
    if not calls:
        return "no collective"
    number, name = calls[-1]["collective_seq_id"], calls[-1]["profiling_name"]
    return f"collective {number}: {name.removeprefix('gloo:')}"


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
    sys.path[0] = str(Path(script).resolve().parent)  # as `python train.py` does
    reporter = threading.Thread(target=report_again_and_again, args=(script, float(seconds)))
    reporter.daemon = True
    reporter.start()
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        report(script, error)
        raise

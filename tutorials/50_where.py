"""Run a script. If it fails, or takes longer than some seconds, print its line and its collective.

torchrun --standalone --nproc-per-node 2 tutorials/50_where.py 60 train.py --its-own options
"""

import linecache
import os
import pickle
import runpy
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

MAIN = threading.main_thread().ident


def line_in(script: str, stack: traceback.StackSummary) -> str:
    """Return the innermost line of the script in a stack."""
    path = Path(script).resolve()
    numbers = [frame.lineno for frame in stack if Path(frame.filename).resolve() == path]
    line = linecache.getline(script, numbers[-1]).strip() if numbers else "not in the script"
    return f"line {numbers[-1] if numbers else '?'} {line}"


def last_collective() -> str:
    """Return the number and the name of the last collective that this process has called."""
    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))
    calls = [call for call in record["entries"] if not call["is_p2p"]]
    if not calls:
        return "no collective"
    return f"collective {len(calls)}: {calls[-1]['profiling_name'].removeprefix('gloo:')}"


def report(script: str, error: BaseException | None = None) -> None:
    """Print where the main thread is, or where it has failed."""
    if error:
        stack = traceback.extract_tb(error.__traceback__)
    else:
        stack = traceback.extract_stack(sys._current_frames()[MAIN])
    collective = last_collective() if dist.is_initialized() else "not connected"
    rank = os.environ.get("RANK", "?")
    print(f"rank {rank}: {line_in(script, stack)}, {collective}", flush=True)


if __name__ == "__main__":
    seconds, script, *options = sys.argv[1:]
    sys.argv = [script, *options]
    timer = threading.Timer(float(seconds), report, [script])
    timer.daemon = True
    timer.start()
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        report(script, error)
        raise

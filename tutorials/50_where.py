"""Run a script. If it takes longer than some seconds, print at which line and collective it is.

torchrun --standalone --nproc-per-node 2 tutorials/50_where.py 3 train.py --its-own options
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


def line_in(script: str) -> str:
    """Return the innermost line of the script in the main thread's stack."""
    stack = traceback.extract_stack(sys._current_frames()[MAIN])
    own = [frame for frame in stack if Path(frame.filename).resolve() == Path(script).resolve()]
    number = own[-1].lineno
    return f"{Path(script).name}:{number} {linecache.getline(script, number).strip()}"


def last_collective() -> str:
    """Return the number and the name of the last collective that this process has called."""
    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))
    calls = [call for call in record["entries"] if not call["is_p2p"]]
    if not calls:
        return "no collective"
    last = calls[-1]
    return f"collective {len(calls)}: {last['profiling_name'].removeprefix('gloo:')}"


def report(script: str) -> None:
    rank = os.environ.get("RANK", "?")
    place = f"{line_in(script)}, {last_collective()}" if dist.is_initialized() else "not connected"
    print(f"rank {rank}: {place}", flush=True)


if __name__ == "__main__":
    seconds, script, *sys.argv = sys.argv[1], *sys.argv[2:3], *sys.argv[2:]
    timer = threading.Timer(float(seconds), report, [script])
    timer.daemon = True
    timer.start()
    runpy.run_path(script, run_name="__main__")
    print(f"rank {os.environ.get('RANK', '?')}: ended", flush=True)

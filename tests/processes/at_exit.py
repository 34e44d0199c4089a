"""Run a program in each launched process, and record the process's gloo threads at exit.

torchrun --standalone --nproc-per-node 2 tests/processes/at_exit.py FOLDER PROGRAM FLAGS…

Each process that destroys a process group writes FOLDER/RANK.json. With SLOW_RELEASE=SECONDS, a
gloo thread of rank 1 stays busy for that long while rank 1 destroys its group.
"""

import atexit
import json
import os
import runpy
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist


def watch(folder: Path) -> None:
    """Record this process's gloo threads before it destroys its group, and again at exit."""
    record, destroy = {}, dist.destroy_process_group

    def destroy_watched(group=None) -> None:
        record["processes"], record["rank"] = dist.get_world_size(), dist.get_rank()
        record["connected"] = gloo_threads()
        if "SLOW_RELEASE" in os.environ:
            leave_a_tensor_to_a_thread(float(os.environ["SLOW_RELEASE"]))
        destroy(group)

    def write() -> None:
        deadline = time.monotonic() + 1  # the kernel may still list threads that have ended
        while gloo_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        if record:
            record["at exit"] = gloo_threads()
            Path(folder, f"{record['rank']}.json").write_text(json.dumps(record))

    dist.destroy_process_group = destroy_watched
    atexit.register(write)


def gloo_threads() -> list[str]:
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # if the thread has just ended
            names.append(file.read_text().strip())
    return sorted(name for name in names if "gloo" in name)


def leave_a_tensor_to_a_thread(seconds: float) -> None:
    """Make a gloo thread on rank 1 take `seconds` to release a tensor. Return once it has begun.

    This reproduces an abort that occurs under load: the gloo thread holds the last reference to a
    tensor, and is not scheduled until the main thread has begun to exit.
    """
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        is_released = threading.Event()
        dist.all_reduce(slow_tensor(seconds, is_released), async_op=True)
        store.set("left to the thread", "")
        assert is_released.wait(60)
    else:
        store.wait(["left to the thread"])  # the all-reduce cannot finish until rank 0 joins it
        dist.all_reduce(torch.zeros(1))


def slow_tensor(seconds: float, is_released: threading.Event) -> torch.Tensor:
    class SlowToRelease:
        def __del__(self):
            is_released.set()
            time.sleep(seconds)  # after sleeping, the thread needs the GIL again

    tensor = torch.zeros(1)
    tensor.attribute = SlowToRelease()
    return tensor


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if Python had started the program
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Run a program as its launcher does, and write which threads of gloo it has until it ends.

torchrun --standalone --nproc-per-node 2 tests/processes/at_exit.py FOLDER PROGRAM FLAGS…

Each process that destroys a process group writes FOLDER/RANK.json. With SLOW_RELEASE=SECONDS, a
thread of gloo is busy for that long when rank 1 destroys its group.
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
    """Write this process's threads of gloo before its group is destroyed, and when it ends."""
    found, destroy = {}, dist.destroy_process_group

    def destroy_watched(group=None) -> None:
        found["processes"], found["rank"] = dist.get_world_size(), dist.get_rank()
        found["connected"] = gloo_threads()
        if "SLOW_RELEASE" in os.environ:
            leave_a_tensor_to_a_thread(float(os.environ["SLOW_RELEASE"]))
        destroy(group)

    def write() -> None:
        deadline = time.monotonic() + 1  # the kernel lists a thread a little longer than it runs
        while gloo_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        if found:
            found["at exit"] = gloo_threads()
            Path(folder, f"{found['rank']}.json").write_text(json.dumps(found))

    dist.destroy_process_group = destroy_watched
    atexit.register(write)


def gloo_threads() -> list[str]:
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # this one has ended
            names.append(file.read_text().strip())
    return sorted(name for name in names if "gloo" in name)


def leave_a_tensor_to_a_thread(seconds: float) -> None:
    """On rank 1, return when a thread of gloo has begun to release a tensor, and takes its time.

    In a process that aborts under load, too, the thread is the last to hold the tensor, and it gets
    a core again only when the main thread is already at its end.
    """
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        is_released = threading.Event()
        dist.all_reduce(slow_tensor(seconds, is_released), async_op=True)
        store.set("left to the thread", "")
        assert is_released.wait(60)
    else:
        store.wait(["left to the thread"])  # until then the collective cannot end
        dist.all_reduce(torch.zeros(1))


def slow_tensor(seconds: float, is_released: threading.Event) -> torch.Tensor:
    class SlowToRelease:
        def __del__(self):
            is_released.set()
            time.sleep(seconds)  # and take Python's lock again

    tensor = torch.zeros(1)
    tensor.attribute = SlowToRelease()
    return tensor


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Show which processes are main processes, and how often each way of downloading downloads a file.

accel-demo nodes -- torchrun tutorials/44_two_machines.py
"""

import os
import platform
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.show import table

SECONDS = 1  # that a download takes


def main() -> None:
    state = PartialState(cpu=True)
    rank, processes, node = state.process_index, state.num_processes, os.environ["GROUP_RANK"]
    is_main, is_local_main = state.is_main_process, state.is_local_main_process
    names = ["rank", "node", "local rank", "is_main_process", "is_local_main_process"]
    own_row = [rank, platform.node(), state.local_process_index, is_main, is_local_main]
    rows = gather_object([own_row])
    if is_main:
        print(f"Connected processes: {len(rows)}\n\n{table(names, rows)}\n")

    ways = {  # the lines around the download, and whether this process takes part
        "every process": (nullcontext, True),
        "`if state.is_main_process:`": (nullcontext, is_main),
        "`if state.is_local_main_process:`": (nullcontext, is_local_main),
        "`with state.main_process_first():`": (state.main_process_first, True),
        "`with state.local_main_process_first():`": (state.local_main_process_first, True),
    }
    rows_of = {"the node's own disk": [], "a shared folder": []}
    [folder] = broadcast_object_list([tempfile.mkdtemp() if is_main else None])
    for number, (way, (context, takes_part)) in enumerate(ways.items()):
        shared = Path(folder, f"shared-{number}")
        own_disk = Path(folder, f"disk-{number}-of-machine-{node}")  # the others do not look here
        downloaded = [False, False]
        state.wait_for_everyone()
        with context():
            if takes_part:
                downloaded = download([own_disk, shared])
        state.wait_for_everyone()
        found = [(disk / "data").exists() for disk in (own_disk, shared)]
        results = gather_object([[*downloaded, *found]])
        counts = [sum(values) for values in zip(*results, strict=True)]
        for place, downloads, found in zip(rows_of, counts[:2], counts[2:], strict=True):
            rows_of[place].append([way, downloads, processes - found])
    if is_main:
        for place, rows in rows_of.items():
            head = [f"who downloads to {place}", "downloads", "ranks without the file"]
            print(table(head, rows), end="\n\n")
        shutil.rmtree(folder)
    state.destroy_process_group()


def download(disks: list[Path]) -> list[bool]:
    """Write a file to each of the disks that do not have it. Return which ones did not."""
    missing = [not (disk / "data").exists() for disk in disks]
    if any(missing):
        time.sleep(SECONDS)
    for disk, is_missing in zip(disks, missing, strict=True):
        if is_missing:
            disk.mkdir(exist_ok=True)
            (disk / "data").touch()
    return missing


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()

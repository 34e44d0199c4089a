"""Start two processes that call `init_process_group` with the same rank or with their own ranks.

python tutorials/94_same_rank.py
"""

import os
import re
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from accel_demo.processes.launch import free_port, run_to_end
from accel_demo.show import table

TORCHRUN = "torchrun --standalone --nproc-per-node 2 tutorials/94_same_rank.py"
TIME_LIMIT = timedelta(seconds=5)  # the default is 30 minutes


def connect(own_rank: int, folder: str, same: str) -> None:
    """Connect and count the processes. Write the count, or the error, to a file in `folder`."""
    rank = 0 if same == "same" else own_rank
    try:
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=TIME_LIMIT)
    except RuntimeError as error:
        message = re.sub(r"(port: |after )\d+", r"\1…", str(error))
        result = f"`{type(error).__name__}: {message}`"
    else:
        total = torch.ones(1)
        dist.all_reduce(total)
        result = f"connected: {total.item():.0f}"
        dist.destroy_process_group()
    Path(folder, str(os.getpid())).write_text(result)


def main() -> None:
    rows = []
    for launcher in ("`mp.spawn`", "`torchrun`"):
        for same in ("same", "own"):
            with tempfile.TemporaryDirectory() as folder:
                if launcher == "`mp.spawn`":
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
                    mp.spawn(connect, (folder, same), nprocs=2)
                else:
                    run_to_end(f"{TORCHRUN} {folder} {same}")
                results = sorted(file.read_text() for file in Path(folder).iterdir())
            rows.append([launcher, "0 in both" if same == "same" else "0 and 1", *results])
    print(table(["started with", "`rank=`", "one process", "the other process"], rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:  # started by torchrun
        connect(int(os.environ["RANK"]), *sys.argv[1:])
    else:
        main()

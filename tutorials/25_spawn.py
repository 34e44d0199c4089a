"""Start two connected processes without a launcher, with torch.multiprocessing.spawn.

python tutorials/25_spawn.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from accel_demo.processes.launch import free_port

PROCESSES = 2


def main(rank, epochs, batch_size, address):
    """Connect, and add up the ranks. `spawn` passes the rank, and then its `args`."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=PROCESSES)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    if rank == 0:
        print(f"{epochs} epochs, {batch_size} images per process, sum of all ranks: {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    address = f"tcp://127.0.0.1:{free_port()}"
    mp.spawn(main, args=(2, 64, address), nprocs=PROCESSES)

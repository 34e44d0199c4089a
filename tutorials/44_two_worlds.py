"""Start two processes that meet at localhost: a mistake on several nodes.

accel-demo nodes --processes-per-node 1 -- python tutorials/44_two_worlds.py
"""

import os

import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12345"
    dist.init_process_group("gloo", rank=rank, world_size=2)
    print(f"rank {rank} of {dist.get_world_size()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, nprocs=2)

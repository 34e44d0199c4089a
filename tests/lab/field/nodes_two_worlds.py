# accel-demo nodes --processes-per-node 1 -- python nodes_two_worlds.py
import os

import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12345"
    dist.init_process_group("gloo", rank=rank, world_size=2)
    print("rank", rank, "of", dist.get_world_size(), flush=True)
    dist.barrier()  # otherwise, rank 0 may exit before rank 1 has connected


if __name__ == "__main__":
    mp.spawn(main, nprocs=2)

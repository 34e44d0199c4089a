# accel-demo nodes --processes-per-node 1 -- torchrun nodes_local_rank_as_rank.py
import os

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world_size)
dist.all_reduce(torch.ones(1))
print("done", dist.get_rank())

"""Connect the tasks of `srun`, without a launcher.

srun --nodes 2 --ntasks-per-node 2 python tutorials/47_tasks.py
accel-demo nodes --slurm-variables -- python tutorials/47_tasks.py    # without Slurm
"""

import os

import torch
import torch.distributed as dist

NAMES = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS", "GROUP_RANK": "NODEID"}


def main() -> None:
    for name, slurms in NAMES.items():
        os.environ[name] = os.environ[f"SLURM_{slurms}"]
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    node = os.environ["SLURMD_NODENAME"]
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {node}, sum {total.item()}\n", end=""
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

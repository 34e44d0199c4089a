"""Connect the tasks of `srun`, without a launcher.

srun --nodes 2 --ntasks-per-node 2 python tutorials/47_tasks.py       # in a batch script
accel-demo nodes --slurm-variables -- python tutorials/47_tasks.py    # without Slurm
"""

import os

import torch
import torch.distributed as dist

NAMES = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS"}
NAMES |= {"MASTER_ADDR": "LAUNCH_NODE_IPADDR"}  # the node that runs the batch script


def main() -> None:
    for name, slurms in NAMES.items():
        os.environ[name] = os.environ[f"SLURM_{slurms}"]
    os.environ["MASTER_PORT"] = str(20000 + int(os.environ["SLURM_JOB_ID"]) % 10000)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    node, place = (
        os.environ["SLURMD_NODENAME"],
        f"rank {dist.get_rank()} of {dist.get_world_size()}",
    )
    print(f"{place} on {node}, sum {total.item()}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

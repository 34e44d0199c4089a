"""In each process, print the launch variables, the state of Accelerate and the connected ranks.

python tutorials/10_where_am_i.py
accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml tutorials/10_where_am_i.py
torchrun --standalone --nproc-per-node 2 tutorials/10_where_am_i.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, debug_launcher

from accel_demo.processes.connect import use_cpu
from accel_demo.processes.launch import spawn


def where_am_i(plain: bool) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = " ".join(f"{name}={os.environ.get(name, 'unset')}" for name in names)

    accelerator = Accelerator() if plain else Accelerator(cpu=use_cpu())
    rank, world_size = accelerator.process_index, accelerator.num_processes
    kind = f"{accelerator.distributed_type.value}, {accelerator.state.backend or 'no backend'}"
    state = f"process {rank} of {world_size}, {accelerator.device}, {kind}"
    group = dist.get_world_size() if dist.is_initialized() else "none"

    # Prove the connection: each process receives the ranks of all connected processes.
    own_rank = torch.tensor([rank], device=accelerator.device)
    received = accelerator.gather(own_rank).tolist()

    for turn in range(world_size):
        if turn == rank:
            line = f"{environment} | {state} | torch group: {group} | received {received}\n"
            print(line, end="", flush=True)  # one write, so that lines do not interleave
        accelerator.wait_for_everyone()
    if dist.is_initialized():  # wait_for_everyone does not wait if Accelerate is unconnected
        dist.barrier()  # so that no process exits before the others have connected
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="omit cpu=use_cpu()")
    parser.add_argument("--start", choices=("spawn", "debug_launcher"), help="start two processes")
    parser.add_argument("--local-rank", help="ignored; torch.distributed.launch passes it")
    options = parser.parse_args()
    if options.start == "spawn":
        spawn(where_am_i, 2, options.plain)  # uses torch.multiprocessing.spawn
    elif options.start == "debug_launcher":
        debug_launcher(where_am_i, (options.plain,), num_processes=2)
    else:
        where_am_i(options.plain)

"""In each process, print the launch variables, the state of Accelerate and the connected ranks.

python tutorials/10_where_am_i.py
torchrun --standalone --nproc-per-node 2 tutorials/10_where_am_i.py
torchrun --standalone --nproc-per-node 2 tutorials/10_where_am_i.py --cpu
"""

import argparse
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, debug_launcher

from accel_demo.processes.devices import use_cpu


def where_am_i(options: argparse.Namespace) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = " ".join(f"{name}={os.environ.get(name, 'unset')}" for name in names)

    if options.cpu:
        accelerator = Accelerator(cpu=True)
    elif options.cpu_if_needed:
        accelerator = Accelerator(cpu=use_cpu())
    else:
        accelerator = Accelerator()
    rank, world_size = accelerator.process_index, accelerator.num_processes
    kind = f"{accelerator.distributed_type.value}, {accelerator.state.backend or 'no backend'}"
    state = f"process {rank} of {world_size}, {accelerator.device}, {kind}"
    group = dist.get_world_size() if dist.is_initialized() else "none"

    # Test the connection: each process receives the ranks of all connected processes.
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
    parser.add_argument("--cpu", action="store_true", help="use Accelerator(cpu=True)")
    parser.add_argument(
        "--cpu-if-needed", action="store_true", help="use Accelerator(cpu=use_cpu())"
    )
    parser.add_argument("--debug-launcher", action="store_true", help="start two processes")
    options = parser.parse_args()
    if options.debug_launcher:
        debug_launcher(where_am_i, (options,), num_processes=2)
    else:
        where_am_i(options)

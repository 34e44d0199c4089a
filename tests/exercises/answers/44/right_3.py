"""Exercise 44, with a process group for each node, and a loop that waits for the checkpoint."""

import os
import time

import torch.distributed as dist


def run(state, actions):
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    first = state.process_index - state.local_process_index
    nodes = [None] * state.num_processes
    dist.all_gather_object(nodes, (first, size))
    groups = {one: dist.new_group(range(one[0], sum(one))) for one in sorted(set(nodes))}
    node = groups[first, size]
    if state.is_local_main_process:
        actions.download()
        samples = actions.prepare()
    dist.barrier(group=node)
    if not state.is_local_main_process:
        samples = actions.prepare()
    if not state.is_main_process:
        dist.barrier()
    folder = actions.open_run()
    if state.is_main_process:
        dist.barrier()
    correct = actions.evaluate(samples)
    dist.barrier(group=node)
    if state.is_local_main_process:
        actions.clean_up()
    if state.is_main_process:
        actions.save(folder, correct)
    while not list(folder.glob("checkpoint.json")):
        time.sleep(0.01)
    return folder, correct

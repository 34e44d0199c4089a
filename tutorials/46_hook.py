"""Train with a communication hook that sends bfloat16, and compare it with the libraries' own.

torchrun --standalone --nproc-per-node 2 tutorials/46_hook.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DDPCommunicationHookType
from accelerate.utils import DistributedDataParallelKwargs
from send_less import BATCH, make_model
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.devices import use_cpu
from accel_demo.show import table

STEPS = 10


def send_bf16(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket, with 2 bytes per number instead of 4."""
    small = bucket.buffer().bfloat16() / dist.get_world_size()
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda sent: bucket.buffer().copy_(sent.value()[0]))


def with_hook(hook):
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(state=None, hook=hook)
    return model


def with_accelerate():
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    return Accelerator(cpu=use_cpu(), kwargs_handlers=[handler]).prepare(make_model())


def main():
    Accelerator(cpu=True)  # connects the processes
    models = {
        "no hook": DistributedDataParallel(make_model()),
        "`send_bf16`": with_hook(send_bf16),
        "`bf16_compress_hook`": with_hook(bf16_compress_hook),
        "with Accelerate": with_accelerate(),
    }
    sent = {name: train(model) for name, model in models.items()}
    weights = {
        name: torch.cat([*map(torch.flatten, model.parameters())]) for name, model in models.items()
    }
    rows = []
    for name, own in weights.items():
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own.detach())
        are_equal = all(torch.equal(own, each) for each in everyone)
        is_theirs = torch.equal(own, weights["`bf16_compress_hook`"])
        rows.append(
            [name, sent[name], "equal" if are_equal else "different", "yes" if is_theirs else "no"]
        )
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} connected processes\n")
        head = ["method", "bytes per step", "weights of the ranks", "bits of `bf16_compress_hook`"]
        print(table(head, rows))
    dist.destroy_process_group()


def train(model: DistributedDataParallel) -> int:
    """Train on random images. Return the bytes that this rank passed to all-reduces in a step."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 1, 28, 28, generator=draw)
        labels = torch.randint(10, (BATCH,), generator=draw)
        with recorded() as collectives:
            F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(each.size for each in collectives if each.name == "all_reduce")


if __name__ == "__main__":
    main()

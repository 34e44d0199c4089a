"""Record the broadcasts, all-reduces and gradient buckets of DistributedDataParallel.

python tutorials/22_ddp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.group import run_in_group
from accel_demo.show import table


def main(device: torch.device) -> None:
    layers = nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 10)
    model = nn.Sequential(*layers).to(device)
    names = {parameter: name for name, parameter in model.named_parameters()}
    messages, buckets = [], []  # rows of the two tables
    with recorded() as calls:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.009)
    messages.append(("", "`DistributedDataParallel(model)`", calls))

    # DDP calls this instead of its default all-reduce.
    def watch(step: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        order = " ".join(f"`{names[parameter]}`" for parameter in bucket.parameters())
        buckets.append([step[0], bucket.index() + 1, order])
        return allreduce_hook(None, bucket)

    step = [0]
    ddp.register_comm_hook(step, watch)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step[0] in (1, 2, 3):
        inputs, labels = torch.randn(8, 20, device=device), torch.arange(8, device=device)
        with recorded() as calls:
            loss = F.cross_entropy(ddp(inputs), labels)
        messages.append((step[0], "`ddp(inputs)`, and the loss", calls))
        for call, method in (("loss.backward", loss.backward), ("optimizer.step", optimizer.step)):
            with recorded() as calls:
                method()
            messages.append((step[0], f"`{call}()`", calls))
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        sizes = [size_of(tensors) for tensors in (model.parameters(), model.buffers())]
        print("parameters: {} bytes, buffers: {} bytes\n".format(*sizes))
        rows = [[step, call, *bytes_of(calls)] for step, call, calls in messages]
        print(table(["step", "rank 0 calls", "broadcast, bytes", "all-reduce, bytes"], rows))
        print(f"\n{table(['step', 'bucket', 'gradients, in order'], buckets)}\n")
        within_step = sum(len(calls) for _, call, calls in messages if call == "`optimizer.step()`")
        print(f"Collectives within `optimizer.step()`: {within_step}")


def bytes_of(calls) -> list[str]:
    kinds = [[str(c.size) for c in calls if c.name == kind] for kind in ("broadcast", "all_reduce")]
    return [" + ".join(sizes) or "–" for sizes in kinds]


def size_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    run_in_group(main, 2)

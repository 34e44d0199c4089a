"""Train a DDP model whose parameter `extra` is used on no rank, or only on rank 0.

python tutorials/22_unused.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.processes.group import run_in_group
from accel_demo.show import table


class Model(nn.Module):
    """The gradient of `extra` is 4 on the ranks that use it."""

    def __init__(self, ranks: tuple[int, ...]):
        super().__init__()
        self.linear, self.extra, self.ranks = nn.Linear(3, 1), nn.Parameter(torch.zeros(())), ranks

    def forward(self, inputs):
        outputs = self.linear(inputs)
        return outputs + 4 * self.extra if dist.get_rank() in self.ranks else outputs


def main(device: torch.device) -> None:
    rows = []
    for ranks, find_unused in (((), False), ((), True), ((0,), True)):
        network = Model(ranks).to(device)
        ddp = DistributedDataParallel(network, find_unused_parameters=find_unused)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        inputs = torch.ones(1, 3, device=device) + dist.get_rank()  # different on each rank
        ddp(inputs).sum().backward()
        gradient = "none" if network.extra.grad is None else f"{network.extra.grad.item():g}"
        optimizer.step()
        weights = [torch.empty_like(network.linear.weight) for _ in range(dist.get_world_size())]
        dist.all_gather(weights, network.linear.weight.detach())
        try:
            ddp(inputs)
            forward = "completes"
        except RuntimeError as error:
            forward = f"`RuntimeError: {str(error).partition('. ')[0]}.`"
        equal = "equal" if torch.equal(*weights) else "different"
        used_on = "rank 0" if ranks else "no rank"
        rows.append([used_on, f"`{find_unused}`", gradient, equal, forward])
    if dist.get_rank() == 0:
        head = ["`extra` is used on", "`find_unused_parameters`", "gradient of `extra`"]
        print(table([*head, "the ranks' weights after step 1", "forward of step 2"], rows))


if __name__ == "__main__":
    run_in_group(main, 2)

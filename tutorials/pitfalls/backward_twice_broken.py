"""Call `backward` for each of two losses of one forward pass.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/backward_twice_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head_a, self.head_b = nn.Linear(1, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs):
        hidden = self.body(inputs)
        return self.head_a(hidden), self.head_b(hidden)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(1, 5):
        if rank == 0:
            print(f"step {step} of 4 on {dist.get_world_size()} processes", flush=True)
        loss_a, loss_b = (outputs.square().mean() for outputs in model(torch.rand(8, 1)))
        loss_a.backward(retain_graph=True)
        loss_b.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train with a method of a wrapped model in three ways, and compare the ranks' weights.

python tutorials/32_methods.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.processes.group import run_in_group
from accel_demo.show import table


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 2), nn.Linear(2, 6)

    def loss(self, inputs):
        return (self.decoder(self.encoder(inputs)) - inputs).square().mean()

    def forward(self, inputs, method=None):
        if method is not None:
            return getattr(self, method)(inputs)
        return self.decoder(self.encoder(inputs))


METHODS = {
    "ddp.loss(inputs)": lambda ddp, inputs: ddp.loss(inputs),
    "ddp.module.loss(inputs)": lambda ddp, inputs: ddp.module.loss(inputs),
    'ddp(inputs, method="loss")': lambda ddp, inputs: ddp(inputs, method="loss"),
}


def main(device: torch.device) -> None:
    rows = []
    for name, loss_of in METHODS.items():
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Autoencoder().to(device))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        error = ""
        for _ in range(10):
            try:
                loss = loss_of(ddp, torch.randn(8, 6, device=device))
            except AttributeError as caught:
                error = f"`AttributeError: {caught}`"
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = ddp.module.encoder.weight.detach()
        weights = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(weights, weight)
        apart = max((each - weights[0]).abs().max().item() for each in weights)
        rows.append([f"`{name}`", error or (f"differ by {apart:.2f}" if apart else "equal")])
    if dist.get_rank() == 0:
        print(table(["loss", "the ranks' weights after 10 steps"], rows))


if __name__ == "__main__":
    run_in_group(main, 2)

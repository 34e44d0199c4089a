"""Run two forwards of a DDP model before one backward, and check the gradients.

python tutorials/32_two_forwards.py
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.batch_norm import NO_BROADCAST
from accel_demo.processes.group import results_by_rank
from accel_demo.show import table


class RunningScale(nn.Module):
    """Divide by a running standard deviation. Backward reads this buffer, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        self.scale = 0.5 * self.scale + 0.5 * inputs.detach().std()
        return inputs / self.scale


class Model(nn.Module):
    """A layer between two linear ones. The last one is different for real and for fake inputs."""

    def __init__(self, layer: nn.Module, heads: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), layer, nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(heads))

    def forward(self, inputs, head=0):
        return self.heads[head % len(self.heads)](self.body(inputs))


CASES = [
    ("BatchNorm", lambda: Model(nn.BatchNorm1d(8), heads=1), {}),
    ("two heads", lambda: Model(nn.Identity(), heads=2), {}),
    ("two heads", lambda: Model(nn.Identity(), heads=2), {"find_unused_parameters": True}),
    ("running scale", lambda: Model(RunningScale(), heads=1), {}),
    ("running scale", lambda: Model(RunningScale(), heads=1), NO_BROADCAST),
]


def step(model, real, fake, between=lambda: None) -> None:
    first = model(real, 0)
    between()
    (model(fake, 1).square().mean() - first.mean()).backward()


def by_hand(model, real, fake, is_sent: bool) -> None:
    """Do the same without DDP. Rank 0's buffers replace the others as new tensors."""

    def send_buffers():
        for module in model.modules() if is_sent else ():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.clone()
                dist.broadcast(module._buffers[name], 0)

    step(model, real, fake, between=send_buffers)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def compare(device) -> list[str]:
    """Return for each case if the gradients are right, or the error."""
    results = []
    for _, make_model, options in CASES:
        torch.manual_seed(0)
        model = make_model().to(device)
        expected = deepcopy(model)
        torch.manual_seed(dist.get_rank())
        real, fake = torch.randn(2, 16, 4, device=device) * (1 + 2 * dist.get_rank())
        by_hand(expected, real, fake, is_sent=options != NO_BROADCAST)
        try:
            step(DistributedDataParallel(model, **options), real, fake)
        except RuntimeError as error:
            results.append(f"`RuntimeError: {str(error).partition('. ')[0]}.`")
            continue
        grads = [torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, expected)]
        off = ((grads[0] - grads[1]).norm() / grads[1].norm()).item()
        results.append("right" if off < 1e-5 else f"**off by {off:.0%}**")
    return results


def main() -> None:
    by_rank = results_by_rank(compare, 2)
    assert len(by_rank) == 2 and by_rank[0] == by_rank[1]
    options = [", ".join(f"`{name}={value}`" for name, value in each.items()) for *_, each in CASES]
    rows = [
        [name, option or "–", result]
        for (name, *_), option, result in zip(CASES, options, by_rank[0], strict=True)
    ]
    print(table(["model", "option of DDP", "gradients after two forwards and one backward"], rows))


if __name__ == "__main__":
    main()

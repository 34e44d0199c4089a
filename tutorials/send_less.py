"""Train a small network with methods that send fewer bytes than plain DDP.

The programs of page 46 use this module.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DDPCommunicationHookType
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from accel_demo.data import packaged_set
from accel_demo.processes.devices import use_cpu

EVERY = 16  # local steps between two averages
BATCH = 32  # per process
PLAIN_STEPS = 2  # of PowerSGD: the fewest that it allows


def power_sgd(rank: int) -> dict:
    state = {"matrix_approximation_rank": rank, "start_powerSGD_iter": PLAIN_STEPS}
    return {"comm_hook": DDPCommunicationHookType.POWER_SGD, "comm_state_option": state}


HOOKS = {
    "DDP": {},
    "bf16": {"comm_hook": DDPCommunicationHookType.BF16},
    "PowerSGD, rank 4": power_sgd(4),
    "PowerSGD, rank 2": power_sgd(2),
    "PowerSGD, rank 1": power_sgd(1),
}
METHODS = [*HOOKS, "LocalSGD", "DiLoCo"]
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


class DiLoCo:
    """Local steps. After every few of them, an outer optimizer takes one step for all ranks.

    Like Accelerate's `LocalSGD`, it needs a prepared model, and switches off its all-reduce.

    Source: https://arxiv.org/abs/2311.08105
    """

    def __init__(self, model, every: int, lr=0.7, momentum=0.9):
        self.no_sync = model.no_sync()
        self.local, self.every, self.steps = list(model.parameters()), every, 0
        self.shared = [nn.Parameter(weight.detach().clone()) for weight in self.local]
        self.outer = torch.optim.SGD(self.shared, lr, momentum, nesterov=momentum > 0)

    def step(self) -> None:
        """Count a step of the inner optimizer."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        for shared, local in zip(self.shared, self.local, strict=True):
            shared.grad = shared - local  # how far this rank has moved, with the sign of a gradient
            dist.all_reduce(shared.grad)
            shared.grad /= dist.get_world_size()
        self.outer.step()
        self.outer.zero_grad()
        for shared, local in zip(self.shared, self.local, strict=True):
            local.copy_(shared)

    def state_dict(self) -> dict:
        return {"shared": self.shared, "outer": self.outer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for shared, saved in zip(self.shared, state["shared"], strict=True):
            shared.copy_(saved)
        self.outer.load_state_dict(state["outer"])

    def __enter__(self) -> "DiLoCo":
        self.no_sync.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.no_sync.__exit__(*error)
        if self.steps % self.every:
            self.synchronize()


def train(
    method: str, model: nn.Module, batches: Batches, every: int = EVERY, outer_lr: float = 0.7
) -> nn.Module:
    """Train for one step per batch, and return the model without its wrapper."""
    hook = DistributedDataParallelKwargs(**HOOKS.get(method, {}))
    accelerator = Accelerator(cpu=use_cpu(), kwargs_handlers=[hook])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if method == "DiLoCo":
        local = DiLoCo(model, every, outer_lr)
    else:
        local = LocalSGD(accelerator, model, every, enabled=method == "LocalSGD")
    with local:
        for images, labels in batches:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return accelerator.unwrap_model(model)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def own_batches(epochs: int, seed: int = 0, device: str = "cpu") -> Iterator[tuple]:
    """Yield this rank's batches of images [B, 1, 28, 28] and labels [B]."""
    images, labels = (tensor.to(device) for tensor in packaged_set("train").tensors)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=draw)
        for start in range(0, len(labels) - ranks * BATCH + 1, ranks * BATCH):
            own = order[start + rank * BATCH :][:BATCH]
            yield images[own], labels[own]

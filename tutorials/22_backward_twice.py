"""Call backward on a DDP model in several ways, and check if both ranks have the same gradients.

python tutorials/22_backward_twice.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from accel_demo.processes.group import run_in_group
from accel_demo.show import table


class TwoHeads(nn.Module):
    """Use the layer `shared` twice, and return the outputs of two heads."""

    def __init__(self, **checkpoint_options):  # none: without checkpoints
        super().__init__()
        self.checkpoint_options = checkpoint_options
        self.first, self.shared, self.head_a, self.head_b = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, inputs):
        hidden = self.first(inputs)
        for _ in range(2):
            if self.checkpoint_options:
                hidden = checkpoint(self.shared, hidden, **self.checkpoint_options)
            else:
                hidden = self.shared(hidden)
        return self.head_a(hidden), self.head_b(hidden)


def add_losses(ddp, inputs):
    loss_a, loss_b = (output.square().mean() for output in ddp(inputs))
    (loss_a + loss_b).backward()


def backward_for_each_loss(ddp, inputs):
    loss_a, loss_b = (output.square().mean() for output in ddp(inputs))
    loss_a.backward(retain_graph=True)
    loss_b.backward()


def backward_after_both_forwards(ddp, inputs):
    outputs = [sum(ddp(inputs)), sum(ddp(-inputs))]
    for output in outputs:
        output.square().mean().backward()


def backward_after_each_forward(ddp, inputs):
    for some_inputs in (inputs, -inputs):
        sum(ddp(some_inputs)).square().mean().backward()


EACH = "`loss_a.backward(retain_graph=True)`, then `loss_b.backward()`"
SHARED = "`checkpoint(shared, …, use_reentrant={})` twice, then one `backward()`"
FIND, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
STEPS = [  # (name, function, options of `checkpoint`, options of DDP)
    ("`(loss_a + loss_b).backward()`", add_losses, {}, {}),
    (EACH, backward_for_each_loss, {}, {}),
    ("… with `find_unused_parameters=True`", backward_for_each_loss, {}, FIND),
    ("forward, forward, `backward()`, `backward()`", backward_after_both_forwards, {}, {}),
    ("forward, `backward()`, forward, `backward()`", backward_after_each_forward, {}, {}),
    (SHARED.format(True), add_losses, {"use_reentrant": True}, {}),
    ("… with `static_graph=True`", add_losses, {"use_reentrant": True}, STATIC),
    (SHARED.format(False), add_losses, {"use_reentrant": False}, {}),
]


def main(device: torch.device) -> None:
    rows = []
    for name, step, of_checkpoint, of_ddp in STEPS:
        ddp = DistributedDataParallel(TwoHeads(**of_checkpoint).to(device), **of_ddp)
        rows.append([name, gradients_after(step, ddp, device)])
    if dist.get_rank() == 0:
        print(table(["training step", "gradients"], rows))


def gradients_after(step: Callable, ddp: nn.Module, device: torch.device) -> str:
    """Run a training step with different inputs on each rank. Compare the ranks' gradients."""
    try:
        step(ddp, torch.randn(2, 3, device=device) + dist.get_rank())
    except RuntimeError as error:
        return f"`RuntimeError: {str(error).partition('. ')[0]}.`"
    own = nn.utils.parameters_to_vector(parameter.grad for parameter in ddp.parameters())
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, own)
    return "the same on both ranks" if torch.equal(*by_rank) else "different on each rank"


if __name__ == "__main__":
    run_in_group(main, 2)

"""What the replicas of a module need before a first step: to fit each other, and to be equal."""

from dataclasses import fields, is_dataclass

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.processes.connect import gather_objects


def check_replicas(module: nn.Module, **options) -> None:
    """Raise the same `ValueError` on every rank where their modules cannot be trained together.

    The options have to be the same on all ranks too.
    """
    parameters = list(module.named_parameters())
    mine = {
        "options": {name: repr(value) for name, value in options.items()},
        "devices": sorted({str(parameter.device) for _, parameter in parameters}),
        "trained": [name for name, parameter in parameters if parameter.requires_grad],
        "tensors": [
            f"{name} {str(tensor.dtype)[6:]}{list(tensor.shape)} with strides {tensor.stride()}"
            for name, tensor in [*parameters, *module.named_buffers()]
        ],
    }
    everyone = gather_objects(mine)
    for rank, other in enumerate(everyone):
        for name, here in everyone[0]["options"].items():
            there = other["options"][name]
            if here != there:
                raise ValueError(
                    f"{name} must be the same on all ranks, but rank 0 has {here} "
                    f"where rank {rank} has {there}"
                )
        if not other["trained"]:
            raise ValueError(f"module has no parameter that requires a gradient on rank {rank}")
        if len(other["devices"]) > 1:
            devices = " and ".join(other["devices"])
            raise ValueError(f"module must be on one device, it is on {devices} on rank {rank}")
    for rank, other in enumerate(everyone):
        for what in ("trained", "tensors"):
            difference = _first_difference(everyone[0][what], other[what])
            if difference:
                here, there = difference
                raise ValueError(
                    f"module must be the same on all ranks, but rank 0 has {here} "
                    f"where rank {rank} has {there}"
                )


def broadcast_from_rank_0(tensors) -> None:
    """Every rank's tensors become those of rank 0, in place."""
    for tensor in tensors:
        message = tensor.detach().contiguous()
        dist.broadcast(message, src=0)
        # `.data`: a graph that is waiting for its backward must not call this tensor changed.
        tensor.data.copy_(message)


def parameters_behind(output) -> set[int]:
    """The ids of the parameters to which the graph of these outputs leads."""
    nodes = [tensor.grad_fn for tensor in _tensors_in(output) if tensor.grad_fn is not None]
    seen, found = set(nodes), set()
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)  # where the gradient of a leaf is added up
        if leaf is not None:
            found.add(id(leaf))
        new = {following for following, _ in node.next_functions if following} - seen
        seen |= new
        nodes += new
    return found


def _tensors_in(value) -> list[torch.Tensor]:
    """All tensors in lists, tuples, dicts and dataclasses, in whatever nesting.

    Source: `_find_tensors` in torch/nn/parallel/distributed.py
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(value.values())
    elif is_dataclass(value):
        parts = [getattr(value, one.name) for one in fields(value)]
    else:
        parts = value if isinstance(value, (list, tuple)) else []
    return [tensor for part in parts for tensor in _tensors_in(part)]


def _first_difference(ours: list[str], theirs: list[str]) -> tuple[str, str] | None:
    for position in range(max(len(ours), len(theirs))):
        pair = [names[position] if position < len(names) else "none" for names in (ours, theirs)]
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return None

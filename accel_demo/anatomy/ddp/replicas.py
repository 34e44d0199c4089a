"""Check that the ranks' replicas of a module match, make them equal, and find unused parameters."""

from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.processes.connect import gather_objects


@dataclass(frozen=True)
class ReplicaDescription:
    """A text description of everything that `check_replicas` checks on one rank."""

    options: dict[str, str]
    devices: list[str]
    trainable: list[str]  # names of the parameters that require a gradient
    tensors: list[str]  # name, dtype, shape and strides of each parameter and buffer


def check_replicas(module: nn.Module, **options) -> None:
    """Raise the same `ValueError` on every rank if the ranks' modules or options do not match."""
    parameters = list(module.named_parameters())
    description = ReplicaDescription(
        options={name: repr(value) for name, value in options.items()},
        devices=sorted({str(parameter.device) for _, parameter in parameters}),
        trainable=[name for name, parameter in parameters if parameter.requires_grad],
        tensors=[
            f"{name} {str(tensor.dtype)[6:]}{list(tensor.shape)} with strides {tensor.stride()}"
            for name, tensor in [*parameters, *module.named_buffers()]
        ],
    )
    descriptions = gather_objects(description)
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        if not other.trainable:
            raise ValueError(f"module has no parameter that requires a gradient on rank {rank}")
        if len(other.devices) > 1:
            devices = " and ".join(other.devices)
            raise ValueError(f"module must be on one device, but it is on {devices} on rank {rank}")
        pairs = [(name, first.options[name], other.options[name]) for name in options]
        for names in ((first.trainable, other.trainable), (first.tensors, other.tensors)):
            pairs += [("module", *pair) for pair in zip_longest(*names, fillvalue="none")]
        for name, expected, actual in pairs:
            if actual != expected:
                raise ValueError(
                    f"{name} must be the same on all ranks, but rank 0 has {expected} "
                    f"and rank {rank} has {actual}"
                )


def broadcast_from_rank_0(tensors) -> None:
    """Overwrite every rank's tensors with the tensors of rank 0, in place."""
    for tensor in tensors:
        message = tensor.detach().contiguous()
        dist.broadcast(message, src=0)
        # Without `.data`, autograd would notice the change and a later backward could fail.
        tensor.data.copy_(message)


def parameters_behind(output) -> set[int]:
    """Return the ids of the parameters in the autograd graph of the outputs."""
    nodes = [tensor.grad_fn for tensor in _tensors_in(output) if tensor.grad_fn is not None]
    seen, parameter_ids = set(nodes), set()
    while nodes:
        node = nodes.pop()
        parameter = getattr(node, "variable", None)  # only AccumulateGrad nodes have a variable
        if parameter is not None:
            parameter_ids.add(id(parameter))
        new = {following for following, _ in node.next_functions if following} - seen
        seen |= new
        nodes += new
    return parameter_ids


def _tensors_in(value) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples, dicts and dataclasses.

    Source: `_find_tensors` in torch/nn/parallel/distributed.py
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(value.values())
    elif is_dataclass(value):
        parts = [getattr(value, member.name) for member in fields(value)]
    else:
        parts = value if isinstance(value, (list, tuple)) else []
    return [tensor for part in parts for tensor in _tensors_in(part)]

"""Check that the ranks' replicas of a module match, make them equal, and find unused parameters."""

from itertools import zip_longest

import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from accel_demo.processes.connect import gather_objects


def check_replicas(module: nn.Module, **options) -> None:
    """Raise the same `ValueError` on every rank if the ranks' modules or options do not match."""
    parameters = list(module.named_parameters())
    devices = sorted({str(parameter.device) for _, parameter in parameters})
    trainable = [name for name, parameter in parameters if parameter.requires_grad]
    tensors = [
        f"{name} {str(tensor.dtype)[6:]}{list(tensor.shape)} with strides {tensor.stride()}"
        for name, tensor in [*parameters, *module.named_buffers()]
    ]
    values = [repr(value) for value in options.values()]
    ranks = gather_objects((devices, trainable, tensors, values))
    _, first_trainable, first_tensors, first_values = ranks[0]
    for rank, (devices, trainable, tensors, values) in enumerate(ranks):
        if not trainable:
            raise ValueError(f"module has no parameter that requires a gradient on rank {rank}")
        if len(devices) > 1:
            where = f"{' and '.join(devices)} on rank {rank}"
            raise ValueError(f"module must be on one device, but it is on {where}")
        pairs = [*zip(options, first_values, values, strict=True)]
        for names in ((first_trainable, trainable), (first_tensors, tensors)):
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
    nodes = [tensor.grad_fn for tensor in _find_tensors(output) if tensor.grad_fn is not None]
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

"""A network under nn.DataParallel, DDP or FSDP2, whose copies and buckets can be watched."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.data_parallel import phases
from accel_demo.anatomy.memory.count import bytes_of


@dataclass(frozen=True)
class Watch:
    """What is called around the making of copies of parameters, and with each full bucket of DDP.

    nn.DataParallel and FSDP2 make copies in every step. Those that are watched are made for that
    alone, with the same function, so that nothing else is made meanwhile.
    """

    before_copies: Callable[[], None]
    after_copies: Callable[[Iterable[torch.Tensor]], None]
    bucket: Callable[[torch.Tensor], None] | None = None


def wrap(strategy: str, network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """The module to call in place of the network, which is on the first of the devices."""
    how = {"nn.DataParallel": _data_parallel, "DDP": _ddp, "FSDP2": _fsdp}[strategy]
    return how(network, devices, watch)


def _data_parallel(network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """Ours on a CPU, where PyTorch's own only calls the network."""
    record: list = []
    watch.before_copies()
    replicas = phases.replicate(network, devices, record)
    names = [name for name, _ in network.named_parameters()]
    watch.after_copies(_tensor_at(copy, name) for copy in replicas[1:] for name in names)
    if devices[0].type == "cpu":
        return phases.DataParallel(network, devices)
    return nn.DataParallel(network, devices)


def _ddp(network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    wrapped = DistributedDataParallel(network)

    def share(group, bucket: torch.distributed.GradBucket):
        watch.bucket(bucket.buffer())
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    if watch.bucket:
        wrapped.register_comm_hook(None, share)
    return wrapped


def _fsdp(network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """Each layer is gathered on its own; the largest is gathered here once, to be watched.

    In forward FSDP2 also keeps the buffer a layer came in, until the next one has come.
    Source: wait_for_unshard in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    """
    mesh = init_device_mesh(devices[0].type, (dist.get_world_size(),))
    layers = [layer for layer in network.modules() if [*layer.parameters(recurse=False)]]
    largest = max(layers, key=lambda layer: bytes_of(layer.parameters(recurse=False)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    watch.before_copies()
    largest.unshard()
    watch.after_copies(largest.parameters(recurse=False))
    largest.reshard()
    return network


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    """A replica's parameters are plain attributes: `get_parameter` does not find them."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)

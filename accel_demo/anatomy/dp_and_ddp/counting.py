"""Count what each device receives and holds in a training step of DataParallel and of DDP."""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy import memory, traffic
from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.anatomy.data_parallel.scatter_gather import (
    GATHER_BACKWARD,
    REPLICATE_BACKWARD,
    Event,
)
from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.anatomy.ring import all_reduce_chunked_ring
from accel_demo.anatomy.wire import Wire
from accel_demo.processes.connect import gather_objects

DP, DDP = "DataParallel", "DDP"
CONSTRUCTOR, FORWARD, BACKWARD, STEP = TIMES = (
    "constructor",
    "forward",
    "backward",
    "optimizer.step()",
)
STEPS = 3  # the last step is counted
OF_REPLICA_0 = "gradients of replica 0"


@dataclass
class DeviceCounts:
    """Counts of one device in a training step.

    `received` maps each of `TIMES` to the bytes that arrived from other devices. `peak` maps each
    of `memory.KINDS` and `OF_REPLICA_0` to the most bytes that the device holds in backward.
    """

    process: int  # ID of the process that ran the forward pass
    thread: str  # name of the thread that ran it
    images: int
    received: dict[str, int]
    held: memory.DeviceMemory  # after backward
    peak: dict[str, int]
    buckets: list[int]  # gradient elements in each of DDP's buckets


class ForwardLog:
    """A log of the process, the thread and the number of images in each call of a model.

    `tensors` maps each thread to weak references to all tensors of the model that it called.
    """

    def __init__(self, model: nn.Module):
        self.calls: list[tuple[int, str, int]] = []
        self.tensors: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        model.register_forward_pre_hook(self._note)  # replicas of the model have the hook too

    def _note(self, model: nn.Module, arguments: tuple) -> None:
        thread = threading.current_thread().name.replace("MainThread", "main")
        self.calls.append((os.getpid(), thread, len(arguments[0])))
        self.tensors[thread] = [weakref.ref(tensor) for tensor in tensors_of(model)]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model, or their copies in a replica."""
    found = []
    for module in model.modules():
        places = (vars(module), module._parameters, module._buffers)
        found += [value for place in places for value in place.values()]
    return [value for value in found if isinstance(value, torch.Tensor)]


def count_all(device: torch.device, model_name: str) -> dict[str, list[DeviceCounts]]:
    """Count for each device of DataParallel and each rank of DDP. Every rank must call this."""
    by_device = []
    if dist.get_rank() == 0:
        devices = memory.devices_of_a_process(device, dist.get_world_size())
        by_device = count_data_parallel(devices, model_name)
    dist.barrier()
    return {DP: gather_objects(by_device)[0], DDP: gather_objects(count_ddp(device, model_name))}


def count_data_parallel(devices: list[torch.device], model_name: str) -> list[DeviceCounts]:
    """Train with DataParallel in this process, and return the counts of each device."""
    model, record = memory.make_contiguous_model(model_name, devices[0]), []
    log, optimizer = ForwardLog(model), memory.OPTIMIZERS["adamw"](model.parameters())
    images, labels = memory.batch(devices[0])
    wrapped = DataParallel(model, devices, record)
    events = {CONSTRUCTOR: record.copy()}
    for _ in range(STEPS):
        record.clear()
        log.calls.clear()
        output = wrapped(images)
        events[FORWARD] = record.copy()
        F.cross_entropy(output, labels).backward()
        others = [held_by(log.tensors[f"replica {i}"], optimizer) for i in range(1, len(devices))]
        events[BACKWARD] = record[len(events[FORWARD]) :]
        before = len(record)
        optimizer.step()
        optimizer.zero_grad()
        events[STEP] = record[before:]
    held = memory.data_parallel(devices, model_name, memory.OPTIMIZERS["adamw"])
    peaks = [device.by_kind | {OF_REPLICA_0: 0} for device in held]
    # nn.DataParallel adds up the gradients of all replicas in new memory, so both exist briefly.
    # Source: reduce_add_coalesced in torch/nn/parallel/comm.py
    peaks[0][OF_REPLICA_0] = peaks[0]["gradients"]
    held[1:] = others  # what `memory` counts for them is temporary, and gone after backward
    calls = sorted(log.calls, key=lambda call: int(call[1].removeprefix("replica ")))
    return [
        DeviceCounts(*call, {t: received_by(index, events[t]) for t in TIMES}, bytes_, peak, [])
        for index, (call, bytes_, peak) in enumerate(zip(calls, held, peaks, strict=True))
    ]


def held_by(
    references: list[weakref.ref[torch.Tensor]], optimizer: torch.optim.Optimizer
) -> memory.DeviceMemory:
    """Return the bytes of a replica's tensors that still exist, of their gradients and moments."""
    tensors = [tensor for reference in references if (tensor := reference()) is not None]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    moments = [
        value
        for tensor in tensors
        for value in optimizer.state.get(tensor, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    sizes = dict.fromkeys(memory.KINDS, 0)
    sizes["parameters"] = memory.bytes_of(tensors)
    sizes["gradients"] = memory.bytes_of(gradients)
    sizes["optimizer state"] = memory.bytes_of(moments)
    return memory.DeviceMemory(sizes, stays=0)


def received_by(index: int, events: list[Event]) -> int:
    """Return the bytes that device `index` receives.

    Inputs, weights, buffers and the gradients of the outputs travel from device 0 to the others.
    Outputs and the gradients of the weights travel from the others to device 0.
    """
    if index == 0:
        return sum(event.size for event in events if event.phase in ("gather", REPLICATE_BACKWARD))
    to_others = ("scatter", "replicate", GATHER_BACKWARD)
    own = [event for event in events if event.replica == index]
    return sum(event.size for event in own if event.phase in to_others)


def count_ddp(device: torch.device, model_name: str) -> DeviceCounts:
    """Train with DDP, and return the counts of this rank. Every rank must call this."""
    model, wire, buckets = memory.make_contiguous_model(model_name, device), Wire(), []
    log, optimizer = ForwardLog(model), memory.OPTIMIZERS["adamw"](model.parameters())
    images, labels = (tensor.chunk(wire.world_size)[wire.rank] for tensor in memory.batch(device))
    received: dict[str, int] = {}
    with count_collectives(received, CONSTRUCTOR):
        wrapped = DistributedDataParallel(model)

    def average_in_ring(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.buffer().numel())
        all_reduce_chunked_ring(bucket.buffer(), wire, mean=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, average_in_ring)
    for _ in range(STEPS):
        for log_of_a_step in (wire.sent, log.calls, buckets):
            log_of_a_step.clear()
        with count_collectives(received, FORWARD):
            output = wrapped(images)
        F.cross_entropy(output, labels).backward()
        with count_collectives(received, STEP):
            optimizer.step()
        optimizer.zero_grad()
    _, received[BACKWARD] = traffic.bytes_sent_and_received(wire.messages(), wire.rank)
    (call,) = log.calls
    (held,) = memory.ddp([device], model_name, memory.OPTIMIZERS["adamw"])
    return DeviceCounts(*call, received, held, held.by_kind | {OF_REPLICA_0: 0}, buckets)


@contextmanager
def count_collectives(received: dict[str, int], time: str) -> Iterator[None]:
    """Set `received[time]` to the bytes that this rank receives in the block's collectives."""
    with recorded() as collectives:
        yield
    received[time] = 0
    for collective in collectives:
        if collective.name == "broadcast":  # DDP always broadcasts from rank 0
            received[time] += collective.size if dist.get_rank() > 0 else 0
        elif collective.name == "all_gather":
            received[time] += (dist.get_world_size() - 1) * collective.size
        else:
            raise RuntimeError(f"unexpected collective during {time}: {collective.name}")

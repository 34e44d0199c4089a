"""Connect the processes of a launch, and exchange objects between them."""

import os
from typing import TypeVar

import torch
import torch.distributed as dist

from accel_demo.processes.devices import own_device
from accel_demo.processes.launch_checks import check_kind
from accel_demo.processes.peers import exchange_process_ids
from accel_demo.processes.rendezvous import join_rendezvous

T = TypeVar("T")


def connect(timeout: float) -> torch.device:
    """Connect the processes of a launch, and return the device of this process.

    The processes also exchange their process IDs, so that an error message can name a process that
    has died. Collectives time out after `timeout` seconds. Without a launcher, there is nothing to
    connect. If MPI started the processes, this function leaves it to Accelerate to connect them.

    If some processes do not connect, this function raises `UserError`, or a `RuntimeError` that
    `report_lost_processes` turns into a `UserError`.
    """
    device = own_device()
    check_kind(device)
    if dist.is_initialized() or "RANK" not in os.environ:
        return device
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    dist.init_process_group(backend, device_id=device_id, **join_rendezvous(timeout))
    exchange_process_ids()
    return device


def is_main_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_objects(value: T) -> list[T]:
    """Return the values of all processes, in rank order. Every process passes a picklable value."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values

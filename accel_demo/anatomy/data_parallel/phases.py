"""The phases of nn.DataParallel for any devices, including several replicas on one CPU."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_demo.anatomy.data_parallel.scatter_gather import (
    REPLICATE_BACKWARD,
    Record,
    gather,
    note,
    note_gradients,
    scatter,
    tensors_in,
)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    replicas: int | Sequence,
    kwargs: dict[str, Any] | None = None,
    record: Record = None,
) -> Any:
    """Compute `module(*inputs, **kwargs)`, with the batch split among replicas of the module.

    `replicas` is the number of replicas on the module's device, or a list with the device of each
    replica. The first device in the list must be the module's device. If `inputs` is a tuple, it
    contains the positional arguments; any other value is the only argument. Tensors are split, even
    inside tuples, lists and dicts. All other values are passed to every replica. Raises
    `ValueError` if a device or the inputs are invalid. With one replica, this function still runs
    all phases, whereas torch calls the module directly.
    Source: torch/nn/parallel/data_parallel.py
    """
    arguments = inputs if type(inputs) is tuple else (inputs,)
    devices = devices_for(replicas, module, (arguments, kwargs))
    parts = scatter((arguments, kwargs or {}), devices, record)
    devices = devices[: len(parts)]  # there may be fewer parts than devices
    copies = replicate(module, devices, record)
    positional, named = zip(*parts, strict=True)
    outputs = parallel_apply(copies, positional, named, devices, record)
    return gather(outputs, devices[0], record)


class DataParallel(nn.Module):
    """A module wrapper like `nn.DataParallel`, which calls `data_parallel` in its forward."""

    def __init__(self, module: nn.Module, replicas: int | Sequence, record: Record = None):
        super().__init__()
        devices_for(replicas, module, ())  # raise errors here, not in the first step
        self.module, self.replicas, self.record = module, replicas, record

    def forward(self, *inputs, **kwargs):
        return data_parallel(self.module, inputs, self.replicas, kwargs, self.record)


def replicate(
    module: nn.Module, devices: Sequence[torch.device], record: Record = None
) -> list[nn.Module]:
    """Return a replica of the module for each device.

    Autograd records that the tensors are copied, so backward adds the gradients of all replicas to
    the module's parameters. Replica 0 is not a copy: it uses the module's memory. If a
    forward on replica 0 changes a buffer in place, the module's buffer changes too. Such changes on
    the other replicas are lost.
    Source: torch/nn/parallel/replicate.py
    """
    replicas = []
    for replica, device in enumerate(devices):
        copies = {
            # `[...]` returns an alias with the same strides. `view_as` can change the strides of a
            # channels-last weight with one channel, which makes the model slower.
            id(tensor): tensor.to(device, copy=True) if replica > 0 else tensor[...]
            for tensor in (*module.parameters(), *module.buffers())  # yields a shared tensor once
        }
        note(record, "replicate", replica, device, list(copies.values()), replica > 0)
        note_gradients(record, REPLICATE_BACKWARD, replica, copies.values(), replica > 0)
        replicas.append(_with_tensors(module, copies))
    return replicas


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[tuple],
    kwargs: Sequence[dict],
    devices: Sequence[torch.device],
    record: Record = None,
) -> list:
    """Call all replicas at the same time, each in a separate thread, and return their outputs.

    If a replica raises an exception, this function raises a `RuntimeError` that names the replica.
    Source: torch/nn/parallel/parallel_apply.py
    """
    outputs: list[Any] = [None] * len(replicas)
    errors: list[BaseException | None] = [None] * len(replicas)
    callers_modes = [_modes(device) for device in devices]

    def work(replica: int) -> None:
        try:
            with ExitStack() as stack:
                for enter in callers_modes[replica]:
                    stack.enter_context(enter())
                outputs[replica] = replicas[replica](*inputs[replica], **kwargs[replica])
            note(record, "parallel_apply", replica, devices[replica], outputs[replica], False)
        except BaseException as error:  # includes sys.exit(), which would end only this thread
            errors[replica] = error

    names = [f"replica {replica}" for replica in range(len(replicas))]
    threads = [threading.Thread(target=work, args=(i,), name=name) for i, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, device, error in zip(names, devices, errors, strict=True):
        if error is not None:
            raise RuntimeError(f"{name} on {device}: {type(error).__name__}: {error}") from error
    return outputs


def devices_for(replicas: int | Sequence, module: nn.Module, inputs: Any) -> list[torch.device]:
    """Return the device of each replica. Raises `ValueError` if a device cannot be used."""
    tensors = [*module.parameters(), *module.buffers()]
    if isinstance(replicas, int) and not isinstance(replicas, bool):
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {replicas}")
        devices_used = [tensor.device for tensor in (*tensors, *tensors_in(inputs))]
        replicas = [devices_used[0] if devices_used else torch.device("cpu")] * replicas
    if isinstance(replicas, str) or not isinstance(replicas, Sequence) or not replicas:
        raise ValueError(f"replicas must be a number or a list of devices, got {replicas!r}")
    devices = []
    for device in replicas:
        try:
            devices.append(torch.empty(0, device=device).device)  # "cuda" becomes "cuda:0"
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"replicas: device {device} is not available: {reason}") from None
    for tensor in tensors:
        if tensor.device != devices[0]:
            raise ValueError(
                f"module must be on {devices[0]}, the first device of replicas, but one of its "
                f"tensors is on {tensor.device}"
            )
    return devices


def _with_tensors(module: nn.Module, copies: dict[int, torch.Tensor]) -> nn.Module:
    """Return a copy of the module that uses the copied tensors.

    `copies` maps the id of a tensor to its copy. Each replica needs separate module objects,
    because the replicas run at the same time. `torch.func.functional_call` would not work: it puts
    the tensors into the original module during the call, so all threads would use the tensors of
    the latest call.
    """
    # Each new module has the attributes of the original module, but no parameters.
    new_parts = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, new in new_parts.items():
        for name, child in part._modules.items():
            new._modules[name] = child and new_parts.get(child)
        for name, parameter in part._parameters.items():
            # A copy is not a leaf of the graph, so it is stored as an attribute, not a Parameter.
            setattr(new, name, None if parameter is None else copies[id(parameter)])
        for name, buffer in part._buffers.items():
            new._buffers[name] = None if buffer is None else copies[id(buffer)]
    return new_parts[module]


def _modes(device: torch.device) -> list[Callable]:
    """Return functions that apply this thread's modes, such as autocast, in another thread.

    Without them, a new thread has the default modes. nn.DataParallel passes on whether autocast is
    enabled, but not the autocast dtype.
    """
    kind = device.type
    modes = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    if torch.amp.is_autocast_available(kind):  # the device "meta" has no autocast
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        modes.append(partial(torch.autocast, kind, dtype=dtype, enabled=enabled))
    if kind == "cuda":
        stream = torch.cuda.current_stream(device)
        modes += [partial(torch.cuda.device, device), partial(torch.cuda.stream, stream)]
    return modes

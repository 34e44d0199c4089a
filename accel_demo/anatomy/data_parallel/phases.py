"""nn.DataParallel taken apart: its phases for any devices, and for several replicas on one CPU.

python -m accel_demo.anatomy.data_parallel        # one training step, phase by phase
python -m accel_demo.anatomy.data_parallel bias   # 30 samples over 8 replicas, and a wrong mean
python -m accel_demo.anatomy.data_parallel parts  # VGG's two parts in a call each, or in one
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_demo.anatomy.data_parallel.scatter_gather import Event, gather, note, scatter, tensors_in


def data_parallel(
    module: nn.Module,
    inputs: Any,
    replicas: int | Sequence,
    kwargs: dict[str, Any] | None = None,
    record: list[Event] | None = None,
) -> Any:
    """`module(*inputs, **kwargs)`, with the batch split among replicas of the module.

    `replicas` is how many, all on the module's own device, or a device for each, of which the
    first is the module's own. A tuple of inputs holds the positional arguments; anything else is
    the only one. Tensors are split, in tuples, lists and dicts too; all else goes to every replica.
    One replica goes through all phases as well, where torch would call the module itself.
    Raises ValueError where that cannot be done. Source: torch/nn/parallel/data_parallel.py
    """
    arguments = inputs if type(inputs) is tuple else (inputs,)
    devices = devices_for(replicas, module, (arguments, kwargs))
    parts = scatter((arguments, kwargs or {}), devices, record)
    devices = devices[: len(parts)]  # a small batch does not reach all of them
    copies = replicate(module, devices, record)
    positional, named = zip(*parts, strict=True)
    outputs = parallel_apply(copies, positional, named, devices, record)
    return gather(outputs, devices[0], record)


class DataParallel(nn.Module):
    """`data_parallel` as a module around a module, as nn.DataParallel is."""

    def __init__(self, module: nn.Module, replicas: int | Sequence, record: list | None = None):
        super().__init__()
        devices_for(replicas, module, ())  # a mistake shows here, and not in the first step
        self.module, self.replicas, self.record = module, replicas, record

    def forward(self, *inputs, **kwargs):
        return data_parallel(self.module, inputs, self.replicas, kwargs, self.record)


def replicate(
    module: nn.Module, devices: Sequence[torch.device], record: list | None = None
) -> list[nn.Module]:
    """A copy of the module for each device, its tensors copied so that autograd knows where from.

    The backward of a copy is a sum: whatever gradients reach the replicas are added up in the
    module's own parameters. Replica 0 is no copy: it shares its memory with the module. So what
    its forward writes into a buffer in place stays, and what the others write is lost with them.
    Source: torch/nn/parallel/replicate.py
    """
    replicas = []
    for replica, device in enumerate(devices):
        copies = {
            id(tensor): tensor.to(device, copy=True) if replica > 0 else tensor.view_as(tensor)
            for tensor in (*module.parameters(), *module.buffers())  # shared ones only once
        }
        note(record, "replicate", replica, device, list(copies.values()), replica > 0)
        for tensor in copies.values():
            if record is not None and tensor.requires_grad:
                tensor.register_hook(partial(_note_gradient, record, replica, device))
        replicas.append(_with_tensors(module, copies))
    return replicas


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[tuple],
    kwargs: Sequence[dict],
    devices: Sequence[torch.device],
    record: list | None = None,
) -> list:
    """What each replica makes of its inputs, each in a thread of its own, all at the same time.

    An exception comes back as a RuntimeError with the number of the replica.
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
        except BaseException as error:  # sys.exit() too, which would only end the thread
            errors[replica] = error

    names = [f"replica {replica}" for replica in range(len(replicas))]
    threads = [threading.Thread(target=work, args=(i,), name=name) for i, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, device, error in zip(names, devices, errors, strict=True):
        if error is not None:
            what = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{name} on {device}: {what}") from error
    return outputs


def devices_for(replicas: int | Sequence, module: nn.Module, inputs: Any) -> list[torch.device]:
    """The device of each replica. Raises ValueError where one cannot be had."""
    tensors = [*module.parameters(), *module.buffers()]
    if isinstance(replicas, int) and not isinstance(replicas, bool):
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {replicas}")
        homes = [tensor.device for tensor in (*tensors, *tensors_in(inputs))]
        replicas = [homes[0] if homes else torch.device("cpu")] * replicas
    if isinstance(replicas, str) or not isinstance(replicas, Sequence) or not replicas:
        raise ValueError(f"replicas must be a number or a list of devices, got {replicas!r}")
    devices = []
    for device in replicas:
        try:
            devices.append(torch.empty(0, device=device).device)  # "cuda" becomes "cuda:0"
        except (RuntimeError, AssertionError, TypeError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"replicas: device {device} is not available: {why}") from None
    for tensor in tensors:
        if tensor.device != devices[0]:
            raise ValueError(
                f"module must be on {devices[0]}, the first device of replicas, but one of its "
                f"tensors is on {tensor.device}"
            )
    return devices


def _with_tensors(module: nn.Module, copies: dict[int, torch.Tensor]) -> nn.Module:
    """A module of the same structure, with these tensors (by the id of the original) in place.

    Each replica has a structure of its own, because the replicas run at the same time.
    `torch.func.functional_call` on the one module would not do: it puts the tensors into the module
    for as long as the call takes, and every thread would compute with those of the last one.
    """
    parts = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, its_copy in parts.items():  # which has the same attributes, but no parameters
        for name, child in part._modules.items():
            its_copy._modules[name] = child and parts.get(child)
        for name, parameter in part._parameters.items():
            # A copy is no leaf of the graph, so it cannot be a Parameter: a plain attribute.
            setattr(its_copy, name, None if parameter is None else copies[id(parameter)])
        for name, buffer in part._buffers.items():
            its_copy._buffers[name] = None if buffer is None else copies[id(buffer)]
    return parts[module]


def _modes(device: torch.device) -> list[Callable]:
    """What makes a new thread compute as this one does, which it would not do by itself.

    torch's own takes over whether autocast is on, but not its dtype.
    """
    kind = device.type
    modes = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    if torch.amp.is_autocast_available(kind):  # not for meta
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        modes.append(partial(torch.autocast, kind, dtype=dtype, enabled=enabled))
    if kind == "cuda":
        stream = torch.cuda.current_stream(device)
        modes += [partial(torch.cuda.device, device), partial(torch.cuda.stream, stream)]
    return modes


def _note_gradient(
    record: list, replica: int, device: torch.device, gradient: torch.Tensor
) -> None:
    note(record, "backward", replica, device, gradient, replica > 0)

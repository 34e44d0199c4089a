"""Split inputs among replicas and join their outputs again, with a note of what moves where."""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True)
class Event:
    """What one replica did in one phase, for a `record`.

    `size` is in bytes: what moved between this replica and the first one. On one CPU it is what
    would move if each replica had a device of its own.
    """

    phase: str  # scatter, replicate, parallel_apply, gather, or backward: one of its gradients
    replica: int
    device: torch.device
    thread: str
    shapes: tuple[tuple[int, ...], ...]
    size: int


def scatter(inputs: Any, devices: Sequence[torch.device], record: list | None = None) -> list:
    """One part of the inputs for each device: `chunk_sizes` along dimension 0 of every tensor.

    Fewer parts than devices where the samples do not reach. Gradients flow back to the inputs.
    Raises ValueError unless all tensors have one batch size: torch's own scatter goes on with
    what the shortest gives. Source: torch/nn/parallel/scatter_gather.py
    """
    tensors = tensors_in(inputs)
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("inputs must hold tensors with the samples along dimension 0")
    batch_sizes = sorted({len(tensor) for tensor in tensors})
    if len(batch_sizes) > 1:
        raise ValueError(f"inputs must have the same batch size everywhere, got {batch_sizes}")
    sizes = chunk_sizes(batch_sizes[0], len(devices))

    def part_of(tensor: torch.Tensor, replica: int) -> torch.Tensor:
        part = tensor.split(sizes)[replica]
        return part.to(devices[replica], copy=replica > 0)

    parts = []
    for replica in range(len(sizes)):
        parts.append(map_tensors(partial(part_of, replica=replica), inputs))
        has_moved = replica > 0 or any(tensor.device != devices[0] for tensor in tensors)
        note(record, "scatter", replica, devices[replica], parts[-1], has_moved)
    return parts


def gather(outputs: Sequence, device: torch.device, record: list | None = None) -> Any:
    """The outputs of all replicas joined along dimension 0, on one device.

    Numbers (tensors without dimensions) become a vector with one for each replica. Raises
    ValueError where outputs hold something else than tensors and None, or not the same.
    Source: torch/nn/parallel/scatter_gather.py
    """
    for replica, output in enumerate(outputs):
        has_moved = replica > 0 or any(tensor.device != device for tensor in tensors_in(output))
        note(record, "gather", replica, device, output, has_moved)

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        rows = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
        return torch.cat([row.to(device) for row in rows])

    def join_other(*values: Any) -> None:
        if any(value is not None for value in values):
            kinds = sorted({type(value).__name__ for value in values})
            raise ValueError(f"outputs must be tensors to be gathered, got {', '.join(kinds)}")

    return map_tensors(join, *outputs, other=join_other)


def chunk_sizes(batch_size: int, replicas: int) -> list[int]:
    """How `torch.chunk` splits a batch: equal chunks, rounded up, and what is left in the last.

    So they are uneven where the batch does not divide, and there may be fewer than replicas.
    """
    if batch_size == 0:
        return [0]
    return [len(chunk) for chunk in torch.empty(batch_size).chunk(replicas)]


def mean_over_samples(means: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The mean over all samples from one mean for each chunk, whatever the sizes of the chunks.

    `means.mean()` is that only where all chunks have one size. Raises ValueError unless there is
    a size for each mean.
    """
    if means.shape != (len(sizes),):
        raise ValueError(
            f"sizes must have one for each of means: got {len(sizes)} for {tuple(means.shape)}"
        )
    weights = torch.tensor(sizes, dtype=means.dtype, device=means.device) / sum(sizes)
    return (means * weights).sum()


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """Every tensor in tuples, lists and dicts, in order."""
    found = []
    map_tensors(found.append, structure)
    return found


def map_tensors(function: Callable, *structures: Any, other: Callable | None = None) -> Any:
    """A structure like these, made of `function(*tensors)` of the tensors at each place.

    `other(*values)` gives what stands for anything else; without it, it is that of the first.
    """
    first, *rest = structures
    if all(isinstance(one, torch.Tensor) for one in structures):
        return function(*structures)
    if any(type(one) is not type(first) for one in rest):
        kinds = sorted({type(one).__name__ for one in structures})
        raise ValueError(f"outputs must have the same structure, got {' and '.join(kinds)}")
    if isinstance(first, dict | list | tuple) and any(len(one) != len(first) for one in rest):
        lengths = sorted({len(one) for one in structures})
        raise ValueError(f"outputs must have the same structure, got lengths {lengths}")
    if isinstance(first, dict):
        if any(one.keys() != first.keys() for one in rest):
            raise ValueError("outputs must have the same structure, got dicts with other keys")
        result = copy.copy(first)  # a dict of the same kind
        for key in first:
            result[key] = map_tensors(function, *(one[key] for one in structures), other=other)
        return result
    if isinstance(first, list | tuple):
        items = [
            map_tensors(function, *places, other=other) for places in zip(*structures, strict=True)
        ]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return other(*structures) if other else first


def note(
    record: list | None, phase: str, replica: int, device: torch.device, what: Any, has_moved: bool
) -> None:
    """Add an event to the record, where there is one; `what` holds the tensors it is about."""
    if record is None:
        return
    tensors = tensors_in(what)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) if has_moved else 0
    thread = threading.current_thread()
    name = "main" if thread is threading.main_thread() else thread.name
    record.append(Event(phase, replica, device, name, shapes, size))

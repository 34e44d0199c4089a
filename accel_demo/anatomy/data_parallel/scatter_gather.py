"""Split inputs among replicas, join their outputs, and record the data that moves."""

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

# In backward, an event is noted for each gradient: first for those of the replicas' outputs, which
# leave replica 0, then for those of their parameters, which go back to replica 0.
FORWARD_PHASES = ("scatter", "replicate", "parallel_apply", "gather")
GATHER_BACKWARD, REPLICATE_BACKWARD = "backward of gather", "backward of replicate"
PHASES = (*FORWARD_PHASES, GATHER_BACKWARD, REPLICATE_BACKWARD)


@dataclass(frozen=True)
class Event:
    """The tensors that one replica handled in one phase.

    `size` is the number of bytes moved between this replica and replica 0. On one CPU, it is the
    number of bytes that would move if each replica had a separate device.
    """

    phase: str  # one of `PHASES`
    replica: int
    device: torch.device
    thread: str
    shapes: tuple[tuple[int, ...], ...]
    size: int


Record = list[Event] | None  # None if nothing is recorded


def scatter(inputs: Any, devices: Sequence[torch.device], record: Record = None) -> list:
    """Split every tensor along dimension 0, and return one part of the inputs for each device.

    The parts have the sizes that `chunk_sizes` returns. There may be fewer parts than devices.
    Gradients flow back to the inputs. Raises `ValueError` unless all tensors have the same batch
    size. (If the sizes differ, torch's scatter returns only as many parts as the shortest tensor
    yields.)
    Source: torch/nn/parallel/scatter_gather.py
    """
    tensors = tensors_in(inputs)
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("inputs must contain tensors with the samples along dimension 0")
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


def gather(outputs: Sequence, device: torch.device, record: Record = None) -> Any:
    """Join the outputs of all replicas along dimension 0, on one device.

    Zero-dimensional tensors become a vector with one element per replica. Raises `ValueError` if
    the outputs contain anything except tensors and None, or differ in structure.
    Source: torch/nn/parallel/scatter_gather.py
    """
    for replica, output in enumerate(outputs):
        has_moved = replica > 0 or any(tensor.device != device for tensor in tensors_in(output))
        note(record, "gather", replica, device, output, has_moved)
        note_gradients(record, GATHER_BACKWARD, replica, tensors_in(output), has_moved)

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        rows = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
        return torch.cat([row.to(device) for row in rows])

    def join_other(*values: Any) -> None:
        if any(value is not None for value in values):
            kinds = sorted({type(value).__name__ for value in values})
            raise ValueError(f"outputs must be tensors, got {', '.join(kinds)}")

    return map_tensors(join, *outputs, other=join_other)


def chunk_sizes(batch_size: int, replicas: int) -> list[int]:
    """Return the sizes of the chunks into which `torch.chunk` splits a batch.

    The chunk size is batch_size / replicas, rounded up. The last chunk contains the remaining
    samples and may be smaller. There may be fewer chunks than replicas.
    """
    if batch_size == 0:
        return [0]
    return [len(chunk) for chunk in torch.empty(batch_size).chunk(replicas)]


def mean_over_samples(means: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Compute the mean over all samples from the mean and the size of each chunk.

    `means.mean()` is only correct if all chunks have the same size.
    """
    weights = torch.tensor(sizes, dtype=means.dtype, device=means.device) / sum(sizes)
    return (means * weights).sum()


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """Return every tensor in nested tuples, lists and dicts, in order."""
    tensors = []
    map_tensors(tensors.append, structure)
    return tensors


def map_tensors(function: Callable, *structures: Any, other: Callable | None = None) -> Any:
    """Merge the structures: at each position, replace their tensors by `function(*tensors)`.

    All structures must have the same keys, lengths and types. Values that are not tensors are
    replaced by `other(*values)`. If `other` is None, the value in the first structure is kept.
    """
    first, *rest = structures
    if all(isinstance(value, torch.Tensor) for value in structures):
        return function(*structures)
    if any(type(value) is not type(first) for value in rest):
        kinds = sorted({type(value).__name__ for value in structures})
        raise ValueError(f"outputs must have the same structure, got {' and '.join(kinds)}")
    if not isinstance(first, dict | list | tuple):
        return other(*structures) if other else first
    lengths = sorted({len(value) for value in structures})
    if len(lengths) > 1:
        raise ValueError(f"outputs must have the same structure, got lengths {lengths}")
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in rest):
            raise ValueError("outputs must have the same structure, got dicts with different keys")
        result = copy.copy(first)  # so that the dict keeps its type
        for key in first:
            result[key] = map_tensors(function, *(value[key] for value in structures), other=other)
        return result
    items = [
        map_tensors(function, *values, other=other) for values in zip(*structures, strict=True)
    ]
    return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)


def note(record: Record, phase: str, replica: int, device, structure, has_moved: bool):
    """Add an event about the tensors in `structure` to the record, unless the record is None."""
    if record is None:
        return
    tensors = tensors_in(structure)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    size = sum(tensor.nbytes for tensor in tensors) if has_moved else 0
    thread = threading.current_thread()
    name = "main" if thread is threading.main_thread() else thread.name
    record.append(Event(phase, replica, device, name, shapes, size))


def note_gradients(
    record: Record, phase: str, replica: int, tensors: Iterable[torch.Tensor], has_moved: bool
) -> None:
    """Add an event for the gradient of each tensor when backward computes it."""
    for tensor in tensors:
        if record is not None and tensor.requires_grad:
            options = {"has_moved": has_moved}
            tensor.register_hook(partial(note, record, phase, replica, tensor.device, **options))

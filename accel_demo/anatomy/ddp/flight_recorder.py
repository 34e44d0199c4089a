"""List the collectives that a block of code calls, using PyTorch's flight recorder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from accel_demo.observer.collectives import entries

BYTES = {  # bytes per element; the keys are the recorder's names of the dtypes
    **{"Bool": 1, "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8},
    **{"Float8_e4m3fn": 1, "Float8_e5m2": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Double": 8},
    **{"ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16},
}


@dataclass(frozen=True)
class Collective:
    """One call of a collective on this rank."""

    name: str  # broadcast, all_reduce, …
    size: int  # bytes of this rank's input


@contextmanager
def recorded() -> Iterator[list[Collective]]:
    """Yield a list, and fill it at the end of the `with` block with this rank's collectives.

    The collectives are in call order. The recorder also sees calls from C++ code, so the list
    includes the collectives that `DistributedDataParallel` calls.
    Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    earlier, called = {entry["record_id"] for entry in entries(with_stacks=False)}, []
    yield called
    for entry in entries(with_stacks=False):
        if entry["record_id"] in earlier:
            continue
        sizes = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
        size = sum(torch.Size(shape).numel() * BYTES[dtype] for shape, dtype in sizes)
        called.append(Collective(entry["profiling_name"].split(":")[1], size))

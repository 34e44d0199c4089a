"""The result of `accel-demo memory`: the predicted, counted and measured bytes on each device."""

from dataclasses import dataclass

from accel_demo.lab.memory.formula import Bytes


@dataclass(frozen=True)
class MemoryRow:
    """Bytes that a training step uses on one device.

    For nn.DataParallel on the CPU, they are the bytes of all devices together. `counted` is empty
    if the process uses several GPUs, because tensors are counted on all GPUs together.
    """

    strategy: str
    place: str  # "rank 0", "device 0" or "all 2 devices"
    device: str  # "cpu" or "cuda"
    connected_processes: int
    predicted: Bytes
    counted: Bytes
    measured: Bytes
    relative_error: dict[str, float]  # predicted / measured - 1, for each kind


@dataclass(frozen=True)
class MemoryResult:
    """Memory that a training step uses with each strategy."""

    model: str
    parameters: int
    optimizer: str
    processes: int
    images_per_device: int
    rows: list[MemoryRow]
    predicted_data_parallel_devices: list[Bytes]

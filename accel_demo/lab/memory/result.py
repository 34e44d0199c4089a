"""The result of `accel-demo memory`: the predicted, counted and measured bytes on each device."""

from dataclasses import dataclass

from accel_demo.lab.memory.formula import KINDS, STRATEGIES, Bytes, on_meta, predict
from accel_demo.lab.memory.measure import ProcessMemory


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


def memory_result(
    choices: tuple[str, str, int, int],
    data_parallel: ProcessMemory,
    ranks: list[dict[str, ProcessMemory]],
) -> MemoryResult:
    """Compare the measurements with the formulas.

    `choices` is (model, optimizer, processes, batch size). `ranks` contains the
    measurements of DDP and FSDP2 on each rank.
    """
    model, optimizer, processes, batch_size = choices
    devices = processes if data_parallel.device == "cpu" else len(data_parallel.measured)
    predicted = predict(STRATEGIES[0], model, optimizer, devices, batch_size)
    if len(data_parallel.measured) < devices:  # one measurement for all CPU devices
        names = [f"all {devices} devices"]
        measurable = [{kind: sum(sizes[kind] for sizes in predicted) for kind in KINDS}]
    else:
        names, measurable = [f"device {index}" for index in range(devices)], predicted
    rows = [
        _memory_row(STRATEGIES[0], name, data_parallel, index, sizes)
        for index, (name, sizes) in enumerate(zip(names, measurable, strict=True))
    ]
    for strategy in STRATEGIES[1:]:
        by_rank = predict(strategy, model, optimizer, processes, batch_size)
        for rank, (sizes, memory) in enumerate(zip(by_rank, ranks, strict=True)):
            rows.append(_memory_row(strategy, f"rank {rank}", memory[strategy], 0, sizes))
    parameters = sum(parameter.numel() for parameter in on_meta(model).parameters())
    return MemoryResult(model, parameters, optimizer, processes, batch_size, rows, predicted)


def _memory_row(
    strategy: str, place: str, memory: ProcessMemory, index: int, predicted: Bytes
) -> MemoryRow:
    measured = memory.measured[index]
    counted = memory.counted if len(memory.measured) == 1 else {}
    kinds = [kind for kind in KINDS if predicted[kind] and measured[kind]]
    errors = {kind: predicted[kind] / measured[kind] - 1 for kind in kinds}
    facts = (memory.device, memory.connected_processes, predicted, counted, measured, errors)
    return MemoryRow(strategy, place, *facts)

"""Measure the memory of a training step with each strategy, and compare it with the formulas."""

from accel_demo.anatomy import gil
from accel_demo.lab.memory.formula import KINDS, STRATEGIES, Bytes
from accel_demo.lab.memory.measure import ProcessMemory, measure_each
from accel_demo.lab.memory.prediction import on_meta, predict
from accel_demo.lab.memory.result import MemoryResult, MemoryRow
from accel_demo.processes.devices import own_device
from accel_demo.processes.group import PRELOADED, results_by_rank
from accel_demo.processes.launch import start_preloading
from accel_demo.progress_bar import ProgressBar


def measure_and_predict(
    model: str, optimizer: str, processes: int, batch_size: int
) -> MemoryResult:
    """Measure a training step with each strategy, and compare the memory with the formulas."""
    choices = (model, optimizer, processes, batch_size)
    data_parallel, *distributed = STRATEGIES
    with ProgressBar("measuring", "strategy", total=len(STRATEGIES), leave=False) as bar:
        # Import torch for the other processes while this process measures nn.DataParallel.
        start_preloading(PRELOADED)
        with gil.one_torch_thread():
            here = measure_each(own_device(), [data_parallel], *choices)
        bar.update()
        ranks = results_by_rank(measure_each, processes, distributed, *choices)
        bar.update(len(distributed))
    return memory_result(choices, here[data_parallel], ranks)


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

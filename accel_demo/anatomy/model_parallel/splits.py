"""Train one small model for one step, split among the ranks in five ways."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from accel_demo.processes.connect import gather_objects

WIDTHS = [8, 24, 8, 24, 8]  # features before, between and after the four linear layers
ROWS_PER_RANK, LEARNING_RATE = 8, 2**-6
Chunk = tuple[str, int]  # ("forward" or "backward", number of the micro-batch)


@dataclass(frozen=True)
class SplitResult:
    """The outputs, gradients and weights that one rank has after one step."""

    model: nn.Module  # its parameters have the same names as in the unsplit model
    output: torch.Tensor | None  # None if another rank computes the output
    rows: slice  # the rows of the batch that `output` belongs to
    elements_held: list[int]  # parameter elements on each device of this process


@dataclass(frozen=True)
class MethodSummary:
    """Results of one method on all ranks."""

    method: str
    elements_held: list[int]  # parameter elements on each device
    difference: float  # largest difference from the unsplit model


@dataclass(frozen=True)
class SplitComparison:
    """Results of one training step with each method."""

    methods: list[MethodSummary]
    pipeline_logs: list[list[Chunk]]  # one log per rank


def train_all(device: torch.device, microbatches: int) -> SplitComparison:
    """Train the same model on the same batch with each method. Every rank must call this.

    Raises `ValueError` if the number of ranks or micro-batches is invalid.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check(world_size, microbatches)
    inputs = whole_numbers((ROWS_PER_RANK * world_size, WIDTHS[0]), 100).to(device)
    targets = whole_numbers((ROWS_PER_RANK * world_size, WIDTHS[-1]), 101).to(device)
    reference = over_devices(make_model(), inputs, targets, [device])  # the unsplit model
    batch, results = (inputs, targets, device), {}
    results["DDP"] = data_parallel(make_model(), *batch)
    if rank == 0:  # this method needs only one process
        devices = [device] * max(2, world_size)
        if device.type != "cpu":
            count = min(world_size, torch.accelerator.device_count())
            devices = [torch.device(device.type, index) for index in range(count)]
        results["`.to()`"] = over_devices(make_model(), inputs, targets, devices)
    results["pipeline"], log = pipeline(make_model(), *batch, microbatches)
    results["tensor parallel"] = tensor_parallel(make_model(), *batch)
    results["FSDP2"] = fully_sharded(make_model(), *batch)
    summaries = {
        method: MethodSummary(method, result.elements_held, difference(result, reference))
        for method, result in results.items()
    }
    ranks = gather_objects((summaries, log))
    methods = []
    for method in summaries:
        parts = [summaries[method] for summaries, _ in ranks if method in summaries]
        elements_held = [count for part in parts for count in part.elements_held]
        most = largest(part.difference for part in parts)
        methods.append(MethodSummary(method, elements_held, most))
    return SplitComparison(methods, [log for _, log in ranks])


def data_parallel(model, inputs, targets, device) -> SplitResult:
    """Train with DDP: every rank has the whole model and a part of the batch."""
    rows = _share(inputs)
    wrapped = DistributedDataParallel(model.to(device))
    output = wrapped(inputs[rows])
    _step(model, F.mse_loss(output, targets[rows]))  # DDP averages the gradients in backward
    return SplitResult(model, output, rows, [elements(model)])


def over_devices(model, inputs, targets, devices: list) -> SplitResult:
    """Train in one process, with some layers on each device. Only one device works at a time."""
    parts = [stage_of(model, index, len(devices)) for index in range(len(devices))]
    activations = inputs
    for part, device in zip(parts, devices, strict=True):
        activations = part.to(device)(activations.to(device))
    _step(model, F.mse_loss(activations, targets.to(devices[-1])))
    return SplitResult(model, activations, slice(None), [elements(part) for part in parts])


def pipeline(model, inputs, targets, device, microbatches: int) -> tuple[SplitResult, list[Chunk]]:
    """Train with one stage of layers on each rank. With micro-batches, several stages work at once.

    Also returns a log of this rank's forward and backward calls, in order.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = stage_of(model, rank, world_size).to(device)
    stage, log = PipelineStage(part, rank, world_size, device), []

    def noted(kind: str, call, microbatch, *arguments, **options):
        log.append((kind, microbatch))
        return call(microbatch, *arguments, **options)

    for kind in ("forward", "backward"):
        name = f"{kind}_one_chunk"
        setattr(stage, name, partial(noted, kind, getattr(stage, name)))
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=F.mse_loss)
    last = rank == world_size - 1
    arguments, options = [inputs] if rank == 0 else [], {"target": targets} if last else {}
    output = schedule.step(*arguments, **options)  # forward and backward of all micro-batches
    _step(part)
    return SplitResult(part, output if last else None, slice(None), [elements(part)]), log


def tensor_parallel(model, inputs, targets, device) -> SplitResult:
    """Train with each matrix split among the ranks. Forward all-reduces after every two layers."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan |= {"4": ColwiseParallel(), "6": RowwiseParallel()}
    model = parallelize_module(model.to(device), mesh, plan)
    output = model(inputs)
    _step(model, F.mse_loss(output, targets))
    return SplitResult(model, output, slice(None), [elements(model)])


def fully_sharded(model, inputs, targets, device) -> SplitResult:
    """Train with FSDP2: each rank stores a shard of each parameter, and has a part of the batch."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = [layer for layer in model.to(device) if isinstance(layer, nn.Linear)]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh)
    rows = _share(inputs)
    output = model(inputs[rows])
    _step(model, F.mse_loss(output, targets[rows]))
    return SplitResult(model, output, rows, [elements(model)])


def difference(trained: SplitResult, reference: SplitResult) -> float:
    """Return the largest difference in output, weights or gradients. Every rank must call this."""
    expected = dict(reference.model.named_parameters())
    pairs = []
    if trained.output is not None and reference.output is not None:
        pairs = [(trained.output, reference.output[trained.rows])]
    for name, parameter in trained.model.named_parameters():
        pairs += [(parameter, expected[name]), (parameter.grad, expected[name].grad)]
    whole = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    return largest((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in whole)


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference, or NaN if any is NaN. (Python's `max` may skip NaN.)"""
    return torch.tensor([*differences], dtype=torch.float64).max().item()


def make_model() -> nn.Sequential:
    """Return four linear layers with small integer weights, so that no sum is rounded."""
    layers = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(inputs, outputs, bias=False, dtype=torch.float64), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    for seed, weight in enumerate(model.parameters()):
        weight.data = whole_numbers(weight.shape, seed)
    return model


def whole_numbers(shape, seed: int) -> torch.Tensor:
    """Return random integers from -2 to 2, as float64."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def stage_of(model: nn.Sequential, index: int, count: int) -> nn.Sequential:
    """Return stage `index` of `count`: consecutive linear layers, each with the ReLU after it."""
    linear = torch.arange(len(WIDTHS) - 1).tensor_split(count)[index].tolist()
    return model[2 * linear[0] : 2 * linear[-1] + 2]


def elements(model: nn.Module) -> int:
    """Return the number of elements on this rank in the model's parameters."""
    return sum({each.data_ptr(): each.numel() for each in _local(model)}.values())


def timetable(logs: list[list[Chunk]]) -> list[dict[int, Chunk]]:
    """Return which chunk each rank computes in each unit of time. Every chunk takes one unit.

    A chunk starts when its rank has finished the previous chunk and its input is ready. The input
    is either the activations from the previous stage or the gradients from the next stage.
    """
    ends, grid, left = {}, [{} for _ in logs], [list(log) for log in logs]
    for _ in range(sum(map(len, logs))):  # each iteration schedules one chunk whose input is ready
        for rank, log in enumerate(left):
            source = rank + (1 if log and log[0][0] == "backward" else -1)
            if log and (source, *log[0]) not in ends and 0 <= source < len(logs):
                continue
            if log:
                start = max(max(grid[rank], default=-1) + 1, ends.get((source, *log[0]), 0))
                grid[rank][start] = log[0]
                ends[(rank, *log.pop(0))] = start + 1
                break
        else:
            raise ValueError(f"logs must be consistent; these chunks wait forever: {left}")
    return grid


def bubble(grid: list[dict[int, Chunk]]) -> Fraction:
    """Return the fraction of time that ranks spend waiting, from the first to the last chunk."""
    length = 1 + max(time for row in grid for time in row)
    return 1 - Fraction(sum(len(row) for row in grid), length * len(grid))


def check(processes: int, microbatches: int) -> None:
    """Raise `ValueError` if the number of processes or micro-batches is invalid."""
    layers, rows = len(WIDTHS) - 1, ROWS_PER_RANK * processes
    if not 1 <= processes <= layers:
        raise ValueError(f"processes must be from 1 to {layers}, one per layer, got {processes}")
    if microbatches < 1 or rows % microbatches:
        raise ValueError(
            f"microbatches must be a divisor of the batch of {rows} rows, got {microbatches}"
        )


def _local(model: nn.Module) -> list[torch.Tensor]:
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in parameters]


def _share(inputs: torch.Tensor) -> slice:
    """Return this rank's rows of the batch."""
    count = len(inputs) // dist.get_world_size()
    return slice(count * dist.get_rank(), count * (dist.get_rank() + 1))


def _step(model: nn.Module, loss: torch.Tensor | None = None) -> None:
    if loss is not None:
        loss.backward()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()

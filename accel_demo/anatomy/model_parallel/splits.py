"""One training step of one small model, split in five ways, and what each rank holds of it.

python -m accel_demo.anatomy.model_parallel --processes 2
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

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


def train_all(device: torch.device, microbatches: int) -> tuple[dict, dict, list]:
    """All ways, each with the same model and batch. Every rank has to call this.

    Gives for each way what each device holds of the parameters and how far its result is from the
    unsplit model's; what FSDP2 holds when, by rank; and what each rank did in the pipeline. Raises
    ValueError where the processes are more than the layers, or the batch has no such pieces.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check(world_size, microbatches)
    inputs = whole_numbers((ROWS_PER_RANK * world_size, WIDTHS[0]), 100).to(device)
    targets = whole_numbers((ROWS_PER_RANK * world_size, WIDTHS[-1]), 101).to(device)
    reference = over_devices(make_model(), inputs, targets, [device])  # one part: not split
    batch, found = (inputs, targets, device), {}
    found["DDP"] = data_parallel(make_model(), *batch)
    if rank == 0:  # which needs no other process
        devices = [device] * max(2, world_size)
        if device.type != "cpu":
            count = min(world_size, torch.accelerator.device_count())
            devices = [torch.device(device.type, index) for index in range(count)]
        found["`.to()`"] = over_devices(make_model(), inputs, targets, devices)
    found["pipeline"], events = pipeline(make_model(), *batch, microbatches)
    found["tensor parallel"] = tensor_parallel(make_model(), *batch)
    found["FSDP2"], held = fully_sharded(make_model(), *batch)
    mine = {way: (one.held, difference(one, reference)) for way, one in found.items()}
    everyone = gather_objects((mine, held, events))
    ways = {}
    for way in found:
        seen = [results[way] for results, _, _ in everyone if way in results]
        ways[way] = (sum((held for held, _ in seen), []), largest(apart for _, apart in seen))
    moments = {moment: [held[moment] for _, held, _ in everyone] for moment in held}
    return ways, moments, [events for _, _, events in everyone]


@dataclass
class SplitResult:
    """What one rank has after one step: its share of the outputs, of gradients and of weights."""

    model: nn.Module  # parameters have the names they have in the model that is not split
    output: torch.Tensor | None  # None where another rank has it
    rows: slice  # of the batch, to which the output belongs
    held: list[int]  # elements of parameters, on each device of this process


def data_parallel(model, inputs, targets, device) -> SplitResult:
    """DDP: every rank has the whole model and a share of the batch. It splits no model."""
    rows = _share(inputs)
    wrapped = DistributedDataParallel(model.to(device))
    output = wrapped(inputs[rows])
    _step(model, F.mse_loss(output, targets[rows]))  # backward averages the gradients
    return SplitResult(model, output, rows, [elements(model)])


def over_devices(model, inputs, targets, devices: list) -> SplitResult:
    """`.to()`: one process, one part of the layers on each device. All but one device wait."""
    parts = [stage_of(model, index, len(devices)) for index in range(len(devices))]
    for part, device in zip(parts, devices, strict=True):
        part.to(device)
    activations = inputs
    for part, device in zip(parts, devices, strict=True):
        activations = part(activations.to(device))
    _step(model, F.mse_loss(activations, targets.to(devices[-1])))
    return SplitResult(model, activations, slice(None), [elements(part) for part in parts])


def pipeline(model, inputs, targets, device, microbatches: int) -> tuple[SplitResult, list]:
    """A stage of the layers on each rank, and the batch in pieces, so that fewer of them wait.

    Also gives what this rank did, in order: ("forward" or "backward", which piece).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = stage_of(model, rank, world_size).to(device)
    stage, events = PipelineStage(part, rank, world_size, device), []

    def noted(kind: str, call):
        def call_and_note(microbatch, *arguments, **options):
            events.append((kind, microbatch))
            return call(microbatch, *arguments, **options)

        return call_and_note

    for kind in ("forward", "backward"):
        name = f"{kind}_one_chunk"
        setattr(stage, name, noted(kind, getattr(stage, name)))
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=F.mse_loss)
    last = rank == world_size - 1
    arguments, options = [inputs] if rank == 0 else [], {"target": targets} if last else {}
    output = schedule.step(*arguments, **options)  # forward and backward of all the pieces
    _step(part)
    return SplitResult(part, output if last else None, slice(None), [elements(part)]), events


def tensor_parallel(model, inputs, targets, device) -> SplitResult:
    """A part of every matrix on each rank: columns, then rows, so that one sum joins a pair."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plan |= {"4": ColwiseParallel(), "6": RowwiseParallel()}
    model = parallelize_module(model.to(device), mesh, plan)
    output = model(inputs)
    _step(model, F.mse_loss(output, targets))
    return SplitResult(model, output, slice(None), [elements(model)])


def fully_sharded(model, inputs, targets, device) -> tuple[SplitResult, dict[str, int]]:
    """FSDP2: a share of every parameter on each rank, gathered layer by layer while it is used.

    The batch is split too. Also gives how many elements of parameters this rank holds, and when.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = [layer for layer in model.to(device) if isinstance(layer, nn.Linear)]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh)
    shards, inside = _local(model), []  # the shards stay while a whole layer is beside them
    for layer in layers:  # called after FSDP's own hook, which gathers the layer's parameters
        layer.register_forward_pre_hook(lambda *_: inside.append(elements(model, shards)))
    held, rows = {"before forward": elements(model)}, _share(inputs)
    output = model(inputs[rows])
    held |= {"inside forward, at the most": max(inside), "after forward": elements(model)}
    _step(model, F.mse_loss(output, targets[rows]))
    held["after the step"] = elements(model)
    return SplitResult(model, output, rows, [elements(model)]), held


def difference(trained: SplitResult, reference: SplitResult) -> float:
    """The largest difference in outputs, gradients and new weights. Every rank has to ask."""
    expected = dict(reference.model.named_parameters())
    pairs = []
    if trained.output is not None and reference.output is not None:
        pairs = [(trained.output, reference.output[trained.rows])]
    for name, parameter in trained.model.named_parameters():
        pairs += [(parameter, expected[name]), (parameter.grad, expected[name].grad)]
    whole = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    return largest((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in whole)


def largest(differences: Iterable[float]) -> float:
    """NaN where one of them is. Python's `max` would pass over it."""
    return torch.tensor([*differences], dtype=torch.float64).max().item()


def make_model() -> nn.Sequential:
    """Four linear layers. All numbers are small and whole, so that no sum of them is rounded."""
    layers = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(inputs, outputs, bias=False, dtype=torch.float64), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    for seed, weight in enumerate(model.parameters()):
        weight.data = whole_numbers(weight.shape, seed)
    return model


def whole_numbers(shape, seed: int) -> torch.Tensor:
    """From -2 to 2, in float64."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def stage_of(model: nn.Sequential, index: int, count: int) -> nn.Sequential:
    """Part `index` of `count`: some linear layers in a row, each with the ReLU behind it."""
    linear = torch.arange(len(WIDTHS) - 1).tensor_split(count)[index].tolist()
    return model[2 * linear[0] : 2 * linear[-1] + 2]


def elements(model: nn.Module, beside: Sequence[torch.Tensor] = ()) -> int:
    """How many elements of parameters this rank has now, in the model and in tensors beside it."""
    return sum({one.data_ptr(): one.numel() for one in (*_local(model), *beside)}.values())


def timetable(logs: list[list[tuple[str, int]]]) -> list[dict[int, tuple[str, int]]]:
    """When each rank did what it noted, if every forward and every backward takes one unit.

    Each starts as soon as its rank has ended the one before, and what it waits for has come: the
    activations of the stage before, or the gradients of the stage behind.
    """
    ends, grid, left = {}, [{} for _ in logs], [list(log) for log in logs]
    for _ in range(sum(map(len, logs))):  # one event each time, of whichever rank need not wait
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
            raise ValueError(f"logs must fit together; these wait for ever: {left}")
    return grid


def bubble(grid: list[dict]) -> Fraction:
    """The share of the time, from first to last event, in which a rank waits."""
    length = 1 + max(time for row in grid for time in row)
    return 1 - Fraction(sum(len(row) for row in grid), length * len(grid))


def check(processes: int, microbatches: int) -> None:
    """Raises ValueError where the model or the batch cannot be split in so many."""
    layers, rows = len(WIDTHS) - 1, ROWS_PER_RANK * processes
    if not 1 <= processes <= layers:
        raise ValueError(f"processes must be from 1 to {layers}, one a layer, got {processes}")
    if microbatches < 1 or rows % microbatches:
        raise ValueError(
            f"microbatches must be a divisor of the batch of {rows} rows, got {microbatches}"
        )


def _local(model: nn.Module) -> list[torch.Tensor]:
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [one.to_local() if isinstance(one, DTensor) else one for one in parameters]


def _share(inputs: torch.Tensor) -> slice:
    """The rows of this rank."""
    count = len(inputs) // dist.get_world_size()
    return slice(count * dist.get_rank(), count * (dist.get_rank() + 1))


def _step(model: nn.Module, loss: torch.Tensor | None = None) -> None:
    if loss is not None:
        loss.backward()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()

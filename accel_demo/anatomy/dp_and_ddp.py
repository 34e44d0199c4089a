"""Compare DataParallel with DDP: processes, threads, bytes received and bytes held by each device.

python -m accel_demo.anatomy.dp_and_ddp
python -m accel_demo.anatomy.dp_and_ddp --processes 4 --model tiny_cnn --plot bytes.svg

Both train the same network with AdamW and the same global batch, on N devices. DataParallel is our
own (data_parallel/phases.py), which also runs on a CPU, and its batch starts on device 0. DDP is
PyTorch's, but averages its gradients in our ring (ring.py), which logs every message. The program
counts the bytes received in the third training step, because DDP creates its final buckets in the
second. The bytes held after backward come from another training without the ring (memory.py).
"""

import math
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy import memory, traffic
from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.anatomy.data_parallel.scatter_gather import (
    GATHER_BACKWARD,
    REPLICATE_BACKWARD,
    Event,
)
from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.anatomy.flags import command_line, read
from accel_demo.anatomy.ring import all_reduce_chunked_ring
from accel_demo.anatomy.wire import Wire
from accel_demo.config import MODELS
from accel_demo.errors import UserError, one_line_errors
from accel_demo.models import CLASSES
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save, table

DP, DDP = "DataParallel", "DDP"
CONSTRUCTOR, FORWARD, BACKWARD, STEP = TIMES = (
    "constructor",
    "forward",
    "backward",
    "optimizer.step()",
)
STEPS = 3  # the last step is counted
FORMULAS = {  # the keys of `DeviceCounts.received` and `memory.KINDS`: (DataParallel, DDP)
    CONSTRUCTOR: ("0", "rank 0: 8·(N−1), others: P + B + M"),
    FORWARD: ("device 0: Y·(N−1)/N, others: P + B + X/N", "rank 0: 0, others: B"),
    BACKWARD: ("device 0: P·(N−1), others: Y/N", "2·P·(N−1)/N"),
    STEP: ("0", "0"),
    "parameters": ("device 0: P, others: 0", "P"),
    "gradients": ("device 0: P, others: 0", "P"),
    "optimizer state": ("device 0: 2·P, others: 0", "2·P"),
    "buckets": ("0", "P"),
    "gathered": ("device 0: Y, others: 0", "0"),
}


@dataclass
class DeviceCounts:
    """Counts of one device in a training step.

    `received` maps each of `TIMES` to the bytes that arrived from other devices.
    """

    process: int  # ID of the process that ran the forward pass
    thread: str  # name of the thread that ran it
    images: int
    received: dict[str, int]
    held: memory.DeviceMemory
    buckets: list[int]  # gradient elements in each of DDP's buckets


@dataclass
class ByteCount:
    """A counted number of bytes, and the number that the formula predicts."""

    name: str  # one of the keys of `FORMULAS`
    actual: int
    expected: float
    # The ring sends whole elements. If N does not divide the length of a bucket, a rank receives up
    # to two elements more or less per bucket than the formula predicts.
    tolerance: int = 0

    @property
    def difference(self) -> float:
        return abs(self.actual - self.expected)


@dataclass
class Sizes:
    """Sizes in bytes that the formulas depend on."""

    parameters: int  # P in the formulas
    buffers: int  # B
    inputs: int  # X: the images of the global batch
    outputs: int  # Y: the logits of the global batch
    metadata: int  # M: what DDP sends to check that all parameters have the same shapes


class ForwardLog:
    """A log of the process, the thread and the number of images in each call of a network.

    `tensors` maps each thread to weak references to all tensors of the network that it called.
    """

    def __init__(self, network: nn.Module):
        self.calls: list[tuple[int, str, int]] = []
        self.tensors: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        network.register_forward_pre_hook(self._note)  # replicas of the network have the hook too

    def _note(self, network: nn.Module, arguments: tuple) -> None:
        thread = threading.current_thread().name.replace("MainThread", "main")
        self.calls.append((os.getpid(), thread, len(arguments[0])))
        self.tensors[thread] = [weakref.ref(tensor) for tensor in tensors_of(network)]


def tensors_of(network: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a network, or their copies in a replica."""
    found = []
    for module in network.modules():
        places = (vars(module), module._parameters, module._buffers)
        found += [value for place in places for value in place.values()]
    return [value for value in found if isinstance(value, torch.Tensor)]


def count_all(device: torch.device, model: str) -> dict[str, list[DeviceCounts]]:
    """Count for each device of DataParallel and each rank of DDP. Every rank must call this."""
    by_device = []
    if dist.get_rank() == 0:
        devices = memory.devices_of_a_process(device, dist.get_world_size())
        by_device = count_data_parallel(devices, model)
    dist.barrier()
    return {DP: gather_objects(by_device)[0], DDP: gather_objects(count_ddp(device, model))}


def count_data_parallel(devices: list[torch.device], model: str) -> list[DeviceCounts]:
    """Train with DataParallel in this process, and return the counts of each device."""
    network, record = memory.make_network(model, devices[0]), []
    log, optimizer = ForwardLog(network), memory.OPTIMIZERS["adamw"](network.parameters())
    images, labels = memory.batch(devices[0])
    wrapped = DataParallel(network, devices, record)
    events = {CONSTRUCTOR: record.copy()}
    for _ in range(STEPS):
        record.clear()
        log.calls.clear()
        output = wrapped(images)
        events[FORWARD] = record.copy()
        F.cross_entropy(output, labels).backward()
        others = [held_by(log.tensors[f"replica {i}"], optimizer) for i in range(1, len(devices))]
        events[BACKWARD] = record[len(events[FORWARD]) :]
        before = len(record)
        optimizer.step()
        optimizer.zero_grad()
        events[STEP] = record[before:]
    held = memory.data_parallel(devices, model, memory.OPTIMIZERS["adamw"])
    held[1:] = others  # what `memory` counts for them is temporary, and gone after backward
    calls = sorted(log.calls, key=lambda call: int(call[1].removeprefix("replica ")))
    return [
        DeviceCounts(*call, {time: received_by(index, events[time]) for time in TIMES}, bytes_, [])
        for index, (call, bytes_) in enumerate(zip(calls, held, strict=True))
    ]


def held_by(
    references: list[weakref.ref[torch.Tensor]], optimizer: torch.optim.Optimizer
) -> memory.DeviceMemory:
    """Return the bytes of a replica's tensors that still exist, of their gradients and moments."""
    tensors = [tensor for reference in references if (tensor := reference()) is not None]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    moments = [
        value
        for tensor in tensors
        for value in optimizer.state.get(tensor, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    sizes = dict.fromkeys(memory.KINDS, 0)
    sizes["parameters"] = memory.bytes_of(tensors)
    sizes["gradients"] = memory.bytes_of(gradients)
    sizes["optimizer state"] = memory.bytes_of(moments)
    return memory.DeviceMemory(sizes, stays=0)


def received_by(index: int, events: list[Event]) -> int:
    """Return the bytes that device `index` receives.

    Inputs, weights, buffers and the gradients of the outputs travel from device 0 to the others.
    Outputs and the gradients of the weights travel from the others to device 0.
    """
    if index == 0:
        return sum(event.size for event in events if event.phase in ("gather", REPLICATE_BACKWARD))
    to_others = ("scatter", "replicate", GATHER_BACKWARD)
    own = [event for event in events if event.replica == index]
    return sum(event.size for event in own if event.phase in to_others)


def count_ddp(device: torch.device, model: str) -> DeviceCounts:
    """Train with DDP, and return the counts of this rank. Every rank must call this."""
    network, wire, buckets = memory.make_network(model, device), Wire(), []
    log, optimizer = ForwardLog(network), memory.OPTIMIZERS["adamw"](network.parameters())
    images, labels = (tensor.chunk(wire.world_size)[wire.rank] for tensor in memory.batch(device))
    received: dict[str, int] = {}
    with count_collectives(received, CONSTRUCTOR):
        wrapped = DistributedDataParallel(network)

    def average_in_ring(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.buffer().numel())
        all_reduce_chunked_ring(bucket.buffer(), wire, mean=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, average_in_ring)
    for _ in range(STEPS):
        for log_of_a_step in (wire.sent, log.calls, buckets):
            log_of_a_step.clear()
        with count_collectives(received, FORWARD):
            output = wrapped(images)
        F.cross_entropy(output, labels).backward()
        with count_collectives(received, STEP):
            optimizer.step()
        optimizer.zero_grad()
    _, received[BACKWARD] = traffic.bytes_sent_and_received(wire.messages(), wire.rank)
    (call,) = log.calls
    (held,) = memory.ddp([device], model, memory.OPTIMIZERS["adamw"])
    return DeviceCounts(*call, received, held, buckets)


@contextmanager
def count_collectives(received: dict[str, int], time: str) -> Iterator[None]:
    """Set `received[time]` to the bytes that this rank receives in the block's collectives."""
    with recorded() as collectives:
        yield
    received[time] = 0
    for collective in collectives:
        if collective.name == "broadcast":  # DDP always broadcasts from rank 0
            received[time] += collective.size if dist.get_rank() > 0 else 0
        elif collective.name == "all_gather":
            received[time] += (dist.get_world_size() - 1) * collective.size
        else:
            raise RuntimeError(f"unexpected collective during {time}: {collective.name}")


def sizes_of(model: str) -> Sizes:
    network = memory.make_network(model, torch.device("cpu"))
    images, _ = memory.batch(torch.device("cpu"))
    dimensions = sum(parameter.dim() for parameter in network.parameters())
    return Sizes(
        parameters=sum(parameter.nbytes for parameter in network.parameters()),
        buffers=sum(buffer.nbytes for buffer in network.buffers()),
        inputs=images.nbytes,
        outputs=len(images) * CLASSES * 4,  # float32
        # One int64 from each rank, then the shape and the strides of each parameter from rank 0.
        # Source: verify_params_across_processes in torch/csrc/distributed/c10d/reducer.cpp
        metadata=8 * (dist.get_world_size() - 1) + 16 * dimensions,
    )


def expected_counts(method: str, index: int, devices: int, sizes: Sizes) -> dict[str, float]:
    """Return the bytes that the formulas predict for one device, with the keys of `FORMULAS`."""
    is_first, others, weights = index == 0, devices - 1, sizes.parameters
    values: dict[str, float] = {"parameters": weights, "gradients": weights, STEP: 0}
    if method == DP:
        of_first = weights if is_first else 0
        to_each = weights + sizes.buffers + sizes.inputs // devices
        return values | {
            CONSTRUCTOR: 0,
            "parameters": of_first,
            "gradients": of_first,
            FORWARD: sizes.outputs * others // devices if is_first else to_each,
            BACKWARD: weights * others if is_first else sizes.outputs // devices,
            "optimizer state": 2 * of_first,
            "buckets": 0,
            "gathered": sizes.outputs if is_first else 0,
        }
    return values | {
        CONSTRUCTOR: 8 * others if is_first else weights + sizes.buffers + sizes.metadata,
        FORWARD: 0 if is_first else sizes.buffers,
        BACKWARD: 2 * weights * others / devices,
        "optimizer state": 2 * weights,
        "buckets": weights,
        "gathered": 0,
    }


def main() -> None:
    parser = command_line(__doc__, processes=2)
    parser.add_argument("--model", choices=MODELS, default="small_cnn", help="default: small_cnn")
    options = read(parser)
    if memory.GLOBAL_BATCH % options.processes:
        batch, processes = memory.GLOBAL_BATCH, options.processes
        raise UserError(f"--processes must divide the batch of {batch}, got {processes}")
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    counts, sizes = count_all(device, options.model), sizes_of(options.model)
    (views,) = memory.ddp([device], options.model, memory.OPTIMIZERS["adamw"], views=True)
    views_by_rank = gather_objects(views.total)
    if dist.get_rank() > 0:
        return
    batch, devices = memory.GLOBAL_BATCH, len(counts[DDP])
    print(f"{options.model} with AdamW, {batch} images per step, N = {devices}:\n")
    print(worker_table(counts))
    print(f"\n{count_table(counts, sizes)}\n")
    print(table(["bytes", *(f"formula for {method}" for method in counts)], formula_rows()))
    print(
        f"\nBytes: P = {sizes.parameters} (parameters), B = {sizes.buffers} (buffers), "
        f"X = {sizes.inputs} (images),\nY = {sizes.outputs} (outputs), M = {sizes.metadata} "
        "(DDP's check of the parameters' shapes)."
    )
    print(f"{comparison(byte_counts(counts, sizes))}\n")
    totals = {method: [device.held.total for device in counts[method]] for method in counts}
    totals["DDP with gradient_as_bucket_view=True"] = views_by_rank
    rows = [
        [name, max(of_device), sum(of_device), f"{sum(of_device) / sum(totals[DP]):.2f}"]
        for name, of_device in totals.items()
    ]
    head = ["bytes held after backward", "fullest device", "all devices", f"all, relative to {DP}"]
    print(table(head, rows))
    if options.plot:
        draw(counts, sizes, options.plot)


def worker_table(counts: dict[str, list[DeviceCounts]]) -> str:
    """Return a table that shows which process and which thread runs the forward pass."""
    devices = [(method, device) for method in counts for device in counts[method]]
    processes = list(dict.fromkeys(device.process for _, device in devices))
    workers = {(method, device.process, device.thread) for method, device in devices}

    def threads_beside(method: str, device: DeviceCounts) -> int:
        """Return how many threads of the device's process ran the forward pass."""
        return sum((name, process) == (method, device.process) for name, process, _ in workers)

    rows = [
        ["process", *(processes.index(device.process) + 1 for _, device in devices)],
        ["thread", *(device.thread for _, device in devices)],
        ["threads running forward", *(threads_beside(*pair) for pair in devices)],
        ["images", *(device.images for _, device in devices)],
    ]
    return table(["forward pass", *columns_of(counts)], rows)


def count_table(counts: dict[str, list[DeviceCounts]], sizes: Sizes) -> str:
    """Return a table of bytes with a column for each device."""
    triples = byte_counts(counts, sizes)
    rows = [
        [row_name(name), *(count.actual for count in triples if count.name == name)]
        for name in FORMULAS
    ]
    devices = [device for method in counts for device in counts[method]]
    rows.append(["held: all kinds", *(device.held.total for device in devices)])
    return table(["bytes", *columns_of(counts)], rows)


def formula_rows() -> list[list[str]]:
    return [[row_name(name), *formulas] for name, formulas in FORMULAS.items()]


def row_name(name: str) -> str:
    return f"{'received in' if name in TIMES else 'held:'} {name}"


def columns_of(counts: dict[str, list[DeviceCounts]]) -> list[str]:
    names = [f"{DP}, device {index}" for index in range(len(counts[DP]))]
    return names + [f"{DDP}, rank {index}" for index in range(len(counts[DDP]))]


def byte_counts(counts: dict[str, list[DeviceCounts]], sizes: Sizes) -> list[ByteCount]:
    """Return all counted numbers of bytes of every device."""
    found = []
    for method, devices in counts.items():
        for index, device in enumerate(devices):
            expected = expected_counts(method, index, len(devices), sizes)
            actual = device.received | device.held.by_kind
            for name in FORMULAS:
                tolerance = 8 * len(device.buckets) if name == BACKWARD else 0  # float32
                found.append(ByteCount(name, actual[name], expected[name], tolerance))
    return found


def comparison(found: list[ByteCount]) -> str:
    """Return a sentence on how many counts equal their formulas.

    Raises `RuntimeError` if a count differs by more than its tolerance.
    """
    wrong = [count for count in found if count.difference > count.tolerance]
    if wrong:
        raise RuntimeError(f"counts that differ from their formulas: {wrong}")
    equal = sum(count.difference == 0 for count in found)
    text = f"{equal} of {len(found)} byte counts equal their formulas."
    if equal < len(found):
        most = math.ceil(max(count.difference for count in found))
        text += f"\nThe others differ by at most {most} bytes, "
        text += "because the ring divides buckets into whole elements."
    return text


def draw(counts: dict[str, list[DeviceCounts]], sizes: Sizes, path: Path) -> None:
    """Draw the bytes that each device holds and receives, in multiples of all parameters."""
    held, received = {}, {}
    for method, devices in counts.items():
        held[method] = [device.held.by_kind for device in devices]
        received[method] = [
            {f"in {time}": device.received[time] for time in (FORWARD, BACKWARD)}
            for device in devices
        ]
    figure = new_figure(max(5.6, 1.9 * len(counts[DDP])), 7)
    upper, lower = figure.subplots(2, 1)
    _draw_bars(upper, "held after backward", held, sizes.parameters, COLOURS)
    _draw_bars(lower, "received in a step", received, sizes.parameters, COLOURS[5:])
    save(figure, path)


def _draw_bars(axes, what: str, parts: dict[str, list], unit: int, colours: list[str]) -> None:
    """Draw a stacked bar for each device. `parts` maps a method to {part: bytes} of each device."""
    places, labels, place = [], [], 0.0
    highest = max(sum(sizes.values()) for devices in parts.values() for sizes in devices) / unit
    visible = {
        part
        for devices in parts.values()
        for sizes in devices
        for part, size in sizes.items()
        if size / unit > 0.01 * highest
    }
    for method, devices in parts.items():
        start = place
        for index, sizes in enumerate(devices):
            low = 0.0
            for (part, size), colour in zip(sizes.items(), colours, strict=False):
                # A part that is too small to see would only confuse in the legend.
                label = part if place == 0 and part in visible else None
                axes.bar(place, size / unit, 0.8, low, color=colour, edgecolor="white", label=label)
                low += size / unit
            total = f"{low:.2f}" if low else "0 (its copy\nis freed)"
            axes.text(place, low + 0.02 * highest, total, ha="center", fontsize=11)
            places.append(place)
            labels.append(f"{'device' if method == DP else 'rank'} {index}")
            place += 1
        middle, below = ((start + place - 1) / 2, -0.13), axes.get_xaxis_transform()
        axes.text(*middle, method, transform=below, ha="center", va="top", fontsize=12)
        place += 0.5
    axes.set_xticks(places, labels, fontsize=10)
    axes.set_ylim(0, 1.12 * highest)
    axes.set_title(f"Bytes {what}", fontsize=12)
    axes.set_ylabel("times the bytes of\nall parameters", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
    axes.legend(frameon=False, fontsize=10, ncols=4, columnspacing=1.2, **below)


if __name__ == "__main__":
    with one_line_errors():
        main()

"""Print the counts and the formulas as tables, and draw the counts."""

import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy import memory
from accel_demo.anatomy.dp_and_ddp import counting, formulas
from accel_demo.anatomy.dp_and_ddp.counting import DDP, DP, DeviceCounts
from accel_demo.anatomy.dp_and_ddp.formulas import FORMULAS, Sizes
from accel_demo.config import MODELS
from accel_demo.errors import UserError
from accel_demo.options import Parser
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table


def main(description: str | None) -> None:
    parser = Parser(description, plot=True, processes=2)
    parser.add_option("--model", "small_cnn", "the model", choices=MODELS)
    options = parser.parse_args()
    if memory.GLOBAL_BATCH % options.processes:
        batch, processes = memory.GLOBAL_BATCH, options.processes
        raise UserError(f"--processes must divide the batch of {batch}, got {processes}")
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    counts = counting.count_all(device, options.model)
    sizes = formulas.sizes_of(options.model)
    (views,) = memory.ddp([device], options.model, memory.OPTIMIZERS["adamw"], views=True)
    views_by_rank = gather_objects(views.total)
    if dist.get_rank() > 0:
        return
    batch, devices = memory.GLOBAL_BATCH, len(counts[DDP])
    print(f"{options.model} with AdamW, {batch} images per step, N = {devices}:\n")
    print(worker_table(counts))
    print(f"\n{count_table(counts)}\n")
    print(table(["bytes", *(f"formula for {method}" for method in counts)], formula_rows()))
    print(
        f"\nBytes: P = {sizes.parameters} (parameters), B = {sizes.buffers} (buffers), "
        f"X = {sizes.inputs} (images),\nY = {sizes.outputs} (outputs), M = {sizes.metadata} "
        "(DDP's check of the parameters' shapes)."
    )
    print(f"{formulas.comparison(formulas.byte_counts(counts, sizes))}\n")
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


def count_table(counts: dict[str, list[DeviceCounts]]) -> str:
    """Return a table of bytes with a column for each device."""
    devices = [device for method in counts for device in counts[method]]
    rows = [
        [row_name(name), *((device.received | device.held.by_kind)[name] for device in devices)]
        for name in FORMULAS
    ]
    rows.append(["held: all kinds", *(device.held.total for device in devices)])
    return table(["bytes", *columns_of(counts)], rows)


def formula_rows() -> list[list[str]]:
    return [[row_name(name), *formulas] for name, formulas in FORMULAS.items()]


def row_name(name: str) -> str:
    return f"{'received in' if name in counting.TIMES else 'held:'} {name}"


def columns_of(counts: dict[str, list[DeviceCounts]]) -> list[str]:
    names = [f"{DP}, device {index}" for index in range(len(counts[DP]))]
    return names + [f"{DDP}, rank {index}" for index in range(len(counts[DDP]))]


def draw(counts: dict[str, list[DeviceCounts]], sizes: Sizes, path: Path) -> None:
    """Draw the bytes that each device holds and receives, in multiples of all parameters."""
    held, received = {}, {}
    for method, devices in counts.items():
        held[method] = [device.held.by_kind for device in devices]
        received[method] = [
            {f"in {time}": device.received[time] for time in (counting.FORWARD, counting.BACKWARD)}
            for device in devices
        ]
    figure = new_figure(max(5.6, 1.9 * len(counts[DDP])), 7)
    upper, lower = figure.subplots(2, 1)
    _draw_bars(upper, "held after backward", held, sizes.parameters, COLORS)
    _draw_bars(lower, "received in a step", received, sizes.parameters, COLORS[5:])
    save(figure, path)


def _draw_bars(axes, what: str, parts: dict[str, list], unit: int, colors: list[str]) -> None:
    """Draw a stacked bar for each device. `parts` maps a method to {part: bytes} of each device."""
    totals = {method: [sum(sizes.values()) / unit for sizes in parts[method]] for method in parts}
    highest = max(map(max, totals.values()))
    places = memory.draw_stacked_bars(axes, parts, unit, colors, gap=0.5)
    for method, places_of_method in places.items():
        for place, height in zip(places_of_method, totals[method], strict=True):
            text = f"{height:.2f}" if height else "0 (its copy\nis freed)"
            axes.text(place, height + 0.02 * highest, text, ha="center", fontsize=11)
        middle, below = (statistics.mean(places_of_method), -0.13), axes.get_xaxis_transform()
        axes.text(*middle, method, transform=below, ha="center", va="top", fontsize=12)
    labels = [f"device {index}" for index in range(len(parts[DP]))]
    labels += [f"rank {index}" for index in range(len(parts[DDP]))]
    axes.set_xticks(sum(places.values(), []), labels, fontsize=10)
    axes.set_ylim(0, 1.12 * highest)
    axes.set_title(f"Bytes {what}", fontsize=12)
    axes.set_ylabel("times the bytes of\nall parameters", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
    # A part that is too small to see would only confuse in the legend.
    visible = {
        part: bar
        for bar, part in zip(*axes.get_legend_handles_labels(), strict=True)
        if max(sizes[part] for devices in parts.values() for sizes in devices)
        > 0.01 * highest * unit
    }
    axes.legend(
        visible.values(), visible, frameon=False, fontsize=10, ncols=4, columnspacing=1.2, **below
    )

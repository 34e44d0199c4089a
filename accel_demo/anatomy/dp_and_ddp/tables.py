"""Print the counts as a table, and draw them."""

import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy import memory
from accel_demo.anatomy.dp_and_ddp import counting
from accel_demo.anatomy.dp_and_ddp.counting import BACKWARD, DDP, DP, FORWARD, DeviceCounts
from accel_demo.config import IMAGE_MODELS
from accel_demo.errors import UserError
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table


def main(description: str | None) -> None:
    parser = Parser(description, plot=True, processes=2)
    parser.add_option("--model", "small_cnn", "the model", choices=IMAGE_MODELS)
    options = parser.parse_args()
    if memory.GLOBAL_BATCH % options.processes:
        batch, processes = memory.GLOBAL_BATCH, options.processes
        raise UserError(f"--processes must divide the batch of {batch}, got {processes}")
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    counts = counting.count_all(device, options.model)
    (views,) = memory.ddp([device], options.model, memory.OPTIMIZERS["adamw"], views=True)
    if dist.get_rank() > 0:
        return
    batch, devices = memory.GLOBAL_BATCH, len(counts[DDP])
    print(f"{options.model} with AdamW, {batch} images per step, N = {devices}:\n")
    print(count_table(counts))
    option = "gradient_as_bucket_view=True"
    print(f"\nWith {option}, each rank of DDP holds at most {views.total} bytes.")
    if options.plot:
        draw(counts, options.plot)


def count_table(counts: dict[str, list[DeviceCounts]]) -> str:
    """Return a table of processes, threads and bytes, with a column for each device."""
    devices = [device for method in counts for device in counts[method]]
    processes = list(dict.fromkeys(device.process for device in devices))
    rows = [
        ["process", *(processes.index(device.process) + 1 for device in devices)],
        ["thread that runs forward", *(device.thread for device in devices)],
        *(
            [f"bytes received in {time}", *(device.received[time] for device in devices)]
            for time in (FORWARD, BACKWARD)
        ),
        ["bytes held in backward, at most", *(sum(device.peak.values()) for device in devices)],
        ["bytes held after backward", *(device.held.total for device in devices)],
    ]
    return table(["", *columns_of(counts)], rows)


def columns_of(counts: dict[str, list[DeviceCounts]]) -> list[str]:
    names = [f"{DP}, device {index}" for index in range(len(counts[DP]))]
    return names + [f"{DDP}, rank {index}" for index in range(len(counts[DDP]))]


def draw(counts: dict[str, list[DeviceCounts]], path: Path) -> None:
    """Draw the bytes that each device holds and receives, in multiples of all parameters."""
    held, received = {}, {}
    for method, devices in counts.items():
        held[method] = [device.peak for device in devices]
        received[method] = [
            {f"in {time}": device.received[time] for time in (FORWARD, BACKWARD)}
            for device in devices
        ]
    unit = counts[DDP][0].held.by_kind["parameters"]
    figure = new_figure(max(5.6, 1.9 * len(counts[DDP])), 7)
    upper, lower = figure.subplots(2, 1)
    # The gathered outputs are too small to see, so they have no color of their own.
    _draw_bars(upper, "held in backward, at most", held, unit, [*COLORS[:4], COLORS[0], COLORS[4]])
    _draw_bars(lower, "received in a step", received, unit, COLORS[5:])
    save(figure, path)


def _draw_bars(axes, what: str, parts: dict[str, list], unit: int, colors: list[str]) -> None:
    """Draw a stacked bar for each device. `parts` maps a method to {part: bytes} of each device."""
    totals = {method: [sum(sizes.values()) / unit for sizes in parts[method]] for method in parts}
    highest = max(map(max, totals.values()))
    places = memory.draw_stacked_bars(axes, parts, unit, colors, gap=0.5)
    for method, places_of_method in places.items():
        for place, height in zip(places_of_method, totals[method], strict=True):
            y = height + 0.02 * highest
            axes.text(place, y, f"{height:.2f}", ha="center", fontsize=11)
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
        visible.values(), visible, frameon=False, fontsize=10, ncols=3, columnspacing=1.2, **below
    )

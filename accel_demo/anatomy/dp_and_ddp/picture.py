"""Draw the bytes that each device holds and receives."""

import statistics
from pathlib import Path

from accel_demo.anatomy.dp_and_ddp.counting import BACKWARD, DDP, DP, FORWARD, DeviceCounts
from accel_demo.anatomy.dp_and_ddp.formulas import Sizes
from accel_demo.anatomy.memory import draw_stacked_bars
from accel_demo.show import COLORS, new_figure, save


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
    _draw_bars(upper, "held after backward", held, sizes.parameters, COLORS)
    _draw_bars(lower, "received in a step", received, sizes.parameters, COLORS[5:])
    save(figure, path)


def _draw_bars(axes, what: str, parts: dict[str, list], unit: int, colors: list[str]) -> None:
    """Draw a stacked bar for each device. `parts` maps a method to {part: bytes} of each device."""
    totals = {method: [sum(sizes.values()) / unit for sizes in parts[method]] for method in parts}
    highest = max(map(max, totals.values()))
    places = draw_stacked_bars(axes, parts, unit, colors, gap=0.5)
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

"""Draw the bytes that each device holds and receives."""

from pathlib import Path

from accel_demo.anatomy.dp_and_ddp.counting import BACKWARD, DDP, DP, FORWARD, DeviceCounts
from accel_demo.anatomy.dp_and_ddp.formulas import Sizes
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
            for (part, size), color in zip(sizes.items(), colors, strict=False):
                # A part that is too small to see would only confuse in the legend.
                label = part if place == 0 and part in visible else None
                axes.bar(place, size / unit, 0.8, low, color=color, edgecolor="white", label=label)
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

"""Print and draw the result of `accel-demo memory`."""

import shlex
from pathlib import Path

from accel_demo import show
from accel_demo.lab import load
from accel_demo.lab.memory import own
from accel_demo.lab.memory.formula import KINDS, formula_of
from accel_demo.lab.memory.own import OwnMemoryResult
from accel_demo.lab.memory.result import MemoryResult, MemoryRow
from accel_demo.wording import byte_size, counted

MIB = 2**20  # bytes
HEAD = ["strategy", "where", "kind", "formula"]
HEAD += ["predicted (MiB)", "counted (MiB)", "measured (MiB)", "error"]
LEFT_OUT = """The formulas leave out:
- BatchNorm's buffers, the images, and scalars such as AdamW's step count
- the gradients on the additional nn.DataParallel devices, which exist only during backward
- FSDP2's all-gather buffer: as large as one layer, and kept until the next layer is gathered
- a GPU's CUDA context, the cuDNN workspace, and free blocks that the allocator caches
- the unused part of a tensor's last memory page: at most 4096 bytes per tensor
- freed memory that a C library other than glibc does not return to the system"""


def text(result: MemoryResult) -> str:
    """Return a table with a row for each kind of memory on each device, and the text `LEFT_OUT`."""
    rows = [cells for row in result.rows for cells in _cells(row, result.optimizer)]
    last = result.rows[-1]
    connected = counted(last.connected_processes, "connected process")
    source = "resident memory" if last.device == "cpu" else "memory allocated by PyTorch on the GPU"
    devices = [
        f"device {index} {byte_size(sum(sizes.values()))}"
        for index, sizes in enumerate(result.predicted_data_parallel_devices)
    ]
    return f"""\
{result.model} with {result.optimizer}: P = {result.parameters:,} parameters, \
{counted(result.images_per_device, "image")} per device.
DDP and FSDP2: {connected} on {last.device}. Measured: {source}.

{show.table(HEAD, rows)}

Predicted for nn.DataParallel: {", ".join(devices)}.
Not all kinds are allocated at once: backward frees activations while it creates gradients.
{LEFT_OUT}"""


def _cells(row: MemoryRow, optimizer: str) -> list[list[str]]:
    """Return a line for each kind of memory that the strategy uses, and a line for the total."""
    lines = []
    for kind, predicted in row.predicted.items():
        if predicted:
            sizes = (predicted, row.counted.get(kind), row.measured[kind])
            error = row.relative_error.get(kind)
            percent = "–" if error is None else f"{error:+.1%}"
            formula = formula_of(row.strategy, kind, optimizer)
            lines.append([kind, formula, *map(_mib, sizes), percent])
    predicted, measured = sum(row.predicted.values()), sum(row.measured.values())
    error = f"{predicted / measured - 1:+.1%}" if measured > 0 else "–"  # "–": nothing grew
    lines.append(["total", "", _mib(predicted), "", _mib(measured), error])
    return [[row.strategy, row.place, *line] for line in lines]


def _mib(size: int | None) -> str:
    return "–" if size is None else f"{size / MIB:.2f}"


def draw_own(result: OwnMemoryResult, path: Path) -> None:
    """Draw a stacked bar for each rank of a script, and one for each strategy."""
    rows = [(f"rank {rank.rank}", rank.kinds, rank.peak) for rank in result.ranks]
    rows += [
        (f"{each.strategy}\n{result.devices} devices", each.kinds, each.peak)
        for each in result.strategies
    ]
    figure = show.new_figure(9.5, 1.8 + 0.5 * len(rows))
    axes = figure.subplots()
    for index, (_, kinds, peak) in enumerate(rows):
        low = 0.0
        for kind, color in zip(own.KINDS, show.COLORS, strict=False):
            size, label = kinds[kind] / MIB, None if index else kind
            axes.barh(index, size, 0.6, left=low, color=color, label=label, edgecolor="white")
            low += size
        label = None if index else "peak of a step: not all at once"
        axes.plot([peak / MIB] * 2, [index - 0.4, index + 0.4], color="black", label=label)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.axhline(len(result.ranks) - 0.5, color="#57606a", linewidth=0.8)
    axes.set_xlabel("MiB; above the line: measured, below it: by formula", fontsize=9)
    axes.set_title(shlex.join(result.command_line)[-80:], fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    show.save(figure, path, load.warning())


def draw(result: MemoryResult, path: Path) -> None:
    """Draw two stacked bars per device: the prediction above the measurement."""
    figure = show.new_figure(9.5, 1.5 + 0.72 * len(result.rows))
    axes = figure.subplots()
    positions, names = [], []
    for index, row in enumerate(result.rows):
        bars = ((-0.2, "by formula", row.predicted), (0.2, "measured", row.measured))
        for offset, name, sizes in bars:
            low = 0.0
            for kind, color in zip(KINDS, show.COLORS, strict=False):
                # If the strategy does not use this kind of memory, the measurement is only noise.
                size = sizes[kind] / MIB if row.predicted[kind] else 0.0
                label = kind if not positions else None
                style = {"color": color, "edgecolor": "white", "linewidth": 0.5}
                axes.barh(index + offset, size, 0.36, left=low, label=label, **style)
                low += size
            axes.text(low, index + offset, f" {low:.0f}", va="center", fontsize=8)
            positions.append(index + offset)
            names.append(name)
        left, style = axes.get_yaxis_transform(), {"ha": "right", "va": "center", "fontsize": 9}
        name = f"{row.strategy}\n{row.place}"
        axes.annotate(name, (0, index), (-82, 0), left, "offset points", **style)
    axes.set_yticks(positions, names, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(result.rows) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.set_xlabel("memory in a training step (MiB)")
    images = counted(result.images_per_device, "image")
    title = f"{result.model}, {result.optimizer}, {images} per device"
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8.5)
    show.save(figure, path, load.warning())

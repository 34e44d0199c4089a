"""The table and the picture of what each device holds."""

from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy.command_line import command_line, read
from accel_demo.anatomy.memory.count import KINDS, OPTIMIZERS, Bytes, check, count_all
from accel_demo.config import MODELS
from accel_demo.errors import UserError
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save, table


def main(description: str) -> None:
    """What `python -m accel_demo.anatomy.memory` does."""
    parser = command_line(description, processes=2)
    parser.add_argument("--model", choices=MODELS, default="small_cnn", help="default: small_cnn")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    options = read(parser)
    try:
        check(options.model, options.optimizer, options.processes)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    """Count everything; rank 0 prints and draws."""
    found = count_all(device, options.model, options.optimizer)
    if dist.get_rank() > 0:
        return
    print(f"Bytes held in a step, {options.model} with {options.optimizer}:\n")
    print(byte_table(found))
    if options.plot:
        draw(found, options)


def byte_table(found: dict[str, list[Bytes]]) -> str:
    """One row for each device under each strategy."""
    kinds = [*KINDS, "together", "stays"]
    if "peak" in found["one process"][0]:
        kinds.append("peak")
    rows = []
    for way, devices in found.items():
        for index, sizes in enumerate(devices):
            sizes = {**sizes, "together": together(sizes)}
            rows.append([way, f"{noun(way)} {index}", *(sizes[kind] for kind in kinds)])
    return table(["strategy", "where", *kinds], rows)


def together(sizes: Bytes) -> int:
    """All kinds of one device. Not all of it need be there at the same moment."""
    return sum(sizes[kind] for kind in KINDS)


def noun(way: str) -> str:
    """What has the memory: DataParallel has devices in one process, each other way has ranks."""
    return "device" if way == "nn.DataParallel" else "rank"


def draw(found: dict[str, list[Bytes]], options) -> None:
    """A bar for each device, its kinds stacked, as multiples of the bytes of all parameters."""
    figure = new_figure(10, 5)
    axes = figure.subplots()
    unit = found["one process"][0]["parameters"]
    positions, labels, x = [], [], 0.0
    centred = {"ha": "center", "va": "top", "fontsize": 9}
    for way, devices in found.items():
        start = x
        for index, sizes in enumerate(devices):
            low = 0.0
            for kind, colour in zip(KINDS, COLOURS, strict=False):
                high = sizes[kind] / unit
                bar = {"color": colour, "edgecolor": "white", "label": kind if x == 0 else None}
                axes.bar(x, high, 0.8, low, **bar)
                low += high
            mark = {
                "color": "black",
                "linewidth": 2.5,
                "label": "stays after zero_grad" if x == 0 else None,
            }
            axes.plot([x - 0.45, x + 0.45], [sizes["stays"] / unit] * 2, **mark)
            positions.append(x)
            labels.append(index)
            x += 1
        name = way.replace(", ", ",\n").replace("gradients as ", "gradients as\n")
        middle, below = ((start + x - 1) / 2, -0.09), axes.get_xaxis_transform()
        axes.annotate(f"{noun(way)}\n\n{name}", middle, (0, 0), below, "offset points", **centred)
        x += 0.7
    axes.set_xticks(positions, labels, fontsize=8)
    axes.set_ylabel("bytes, in multiples of all parameters")
    axes.set_title(f"What each device holds in a step: {options.model}, {options.optimizer}")
    axes.legend(ncols=6, fontsize=8, loc="upper center", frameon=False)
    axes.set_ylim(
        0, 1.15 * max(together(one) for devices in found.values() for one in devices) / unit
    )
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, Path(options.plot))

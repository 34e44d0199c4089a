"""When each bucket is on its way while backward is at work, measured and drawn.

`python -m accel_demo.anatomy.ddp --plot FILE` draws it.
"""

import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.anatomy.ddp.by_hand import HandmadeDDP
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save

PROCESSES, LAYERS, WIDTH, BATCH_SIZE, BUCKET_MIB = 2, 8, 512, 256, 2
STEPS = 4  # the first and the last are drawn: new buckets are slow once


def draw_timeline(path: Path) -> None:
    """Train a few steps with buckets, and draw rank 0's first and last backward.

    On a GPU it shows when the CPU handed the work over: there it is only queued.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.json")
        run_in_group(record, PROCESSES, file)
        if file.exists():  # else not rank 0 of its launch
            draw(json.loads(file.read_text()), path)


def record(device: torch.device, file: Path) -> None:
    """One process of the group: train, and write down what happened in each backward."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = HandmadeDDP(nn.Sequential(*layers).to(device), BUCKET_MIB)
    inputs, steps = torch.randn(BATCH_SIZE, WIDTH, device=device), []
    for _ in range(STEPS):
        loss = model(inputs).square().mean()
        dist.barrier()  # so that nobody waits for a rank that was late before this backward
        started_at = time.perf_counter()
        loss.backward()
        ended_at = time.perf_counter()
        events = [(what, number, at - started_at) for what, number, at in model.events]
        sizes = [bucket.size for bucket in model.buckets]
        steps.append({"seconds": ended_at - started_at, "events": events, "sizes": sizes})
        model.zero_grad()
    if dist.get_rank() == 0:
        file.write_text(json.dumps(steps))


def draw(steps: list[dict], path: Path) -> None:
    """The first step above the last one. The scale of time is the same; it has no numbers."""
    shown = steps[0], steps[-1]
    figure = new_figure(7, 4)
    rows = [len(step["sizes"]) + 1 for step in shown]
    all_axes = figure.subplots(2, 1, sharex=True, height_ratios=[row + 1 for row in rows])
    titles = (
        "Step 1: one bucket, which leaves when the last gradient is there",
        "From step 2 on: buckets that leave while backward goes on",
    )
    for axes, step, title in zip(all_axes, shown, titles, strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        labels = ["gradients"]
        ready = [at for what, _, at in step["events"] if what == "gradient"]
        axes.barh(0, max(ready), color=COLOURS[5], height=0.6, label="backward computes")
        ticks = {"color": COLOURS[7], "markersize": 11, "label": "a gradient is ready"}
        axes.plot(ready, [0] * len(ready), "|", **ticks)
        for bucket, size in enumerate(step["sizes"]):
            times = {(what, number): at for what, number, at in step["events"]}
            start, end = times["start", bucket], times["end", bucket]
            name = "all-reduce" if bucket == 0 else None
            axes.barh(bucket + 1, end - start, 0.6, start, color=COLOURS[1], label=name)
            labels.append(f"bucket {bucket + 1}: {size / 2**20:.0f} MiB")
        axes.axvline(step["seconds"], color=COLOURS[3], linewidth=1.5, label="backward() returns")
        axes.set_yticks(range(len(labels)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[1].set_xticks([])
    all_axes[1].set_xlim(left=0)
    all_axes[1].set_xlabel("time since backward() was called, on rank 0", fontsize=9)
    handles, names = all_axes[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save(figure, path)

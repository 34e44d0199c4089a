"""Measure and draw when each bucket is sent during backward."""

import pickle
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.anatomy.ddp.by_hand import BackwardEvent, HandmadeDDP
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save
from accel_demo.wording import byte_size

PROCESSES, LAYERS, WIDTH, BATCH_SIZE, BUCKET_MIB = 2, 8, 512, 256, 2
STEPS = 4  # the first and the last step are drawn; step 2 is slower, because its buckets are new


@dataclass(frozen=True)
class BackwardTimeline:
    """Start, end and events of one backward call, measured with `time.perf_counter`."""

    start: float
    end: float
    events: list[BackwardEvent]
    bucket_bytes: list[int]


def draw_timeline(path: Path) -> None:
    """Train for a few steps with buckets, and draw rank 0's first and last backward.

    On a GPU, the times show when the CPU queued the work, not when the GPU did the work.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "timelines")
        run_in_group(measure, PROCESSES, file)
        if file.exists():  # only rank 0 of the launch writes it
            draw(pickle.loads(file.read_bytes()), path)


def measure(device: torch.device, file: Path) -> None:
    """Train on this rank. Rank 0 writes its `BackwardTimeline` objects to the file."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = HandmadeDDP(nn.Sequential(*layers).to(device), BUCKET_MIB)
    inputs, timelines = torch.randn(BATCH_SIZE, WIDTH, device=device), []
    for _ in range(STEPS):
        loss = model(inputs).square().mean()
        dist.barrier()  # so that all ranks start backward together
        start = time.perf_counter()
        loss.backward()
        end, sizes = time.perf_counter(), [bucket.flat.nbytes for bucket in model.buckets]
        timelines.append(BackwardTimeline(start, end, model.events, sizes))
        model.zero_grad()
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(timelines))


def draw(timelines: list[BackwardTimeline], path: Path) -> None:
    """Draw the first step above the last step, on a common time axis without numbers."""
    shown = timelines[0], timelines[-1]
    figure = new_figure(7, 4)
    heights = [len(timeline.bucket_bytes) + 2 for timeline in shown]
    all_axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    titles = (
        "Step 1: one bucket, sent when the last gradient is ready",
        "From step 2 on: buckets are sent while backward continues",
    )
    for axes, timeline, title in zip(all_axes, shown, titles, strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        labels = ["gradients"]
        events, zero = timeline.events, timeline.start
        times = {(event.kind, event.index): event.seconds - zero for event in events}
        ready = [seconds for (kind, _), seconds in times.items() if kind == "gradient"]
        axes.barh(0, max(ready), color=COLOURS[5], height=0.6, label="backward computes")
        ticks = {"color": COLOURS[7], "markersize": 11, "label": "a gradient is ready"}
        axes.plot(ready, [0] * len(ready), "|", **ticks)
        for bucket, size in enumerate(timeline.bucket_bytes):
            start, end = times["start", bucket], times["end", bucket]
            name = "all-reduce" if bucket == 0 else None
            axes.barh(bucket + 1, end - start, 0.6, start, color=COLOURS[1], label=name)
            labels.append(f"bucket {bucket + 1}: {byte_size(size)}")
        returns = {"color": COLOURS[3], "linewidth": 1.5, "label": "backward() returns"}
        axes.axvline(timeline.end - zero, **returns)
        axes.set_yticks(range(len(labels)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[1].set_xticks([])
    all_axes[1].set_xlim(left=0)
    all_axes[1].set_xlabel("time since backward() was called, on rank 0", fontsize=9)
    handles, names = all_axes[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save(figure, path)

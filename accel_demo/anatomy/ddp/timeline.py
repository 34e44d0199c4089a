"""Measure when DDP sends each bucket during backward, with one bucket and with several.

python -m accel_demo.anatomy.ddp.timeline
python -m accel_demo.anatomy.ddp.timeline --plot timeline.svg

Two processes on one machine send so fast that overlap gains little. On a CPU, the program therefore
simulates a slow link: an all-reduce ends no earlier than it would over 1 Gbit/s Ethernet.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS
from accel_demo.wording import counted

PROCESSES, LAYERS, WIDTH, BATCH_SIZE = 2, 8, 384, 768
LIMITS = 1000, 1  # in MiB, for one bucket and for several
LINK = 1e9 / 8  # bytes per second; each of two ranks sends as many bytes as the bucket has
NUMBERED = 0, 20, 40, 60, 80  # ms on the time axis of the picture
WARM_UP, MEASURED = 4, 15  # steps; DDP rebuilds its buckets after the first one


@dataclass
class Backward:
    """Times of one backward on one rank, in seconds after the call of `backward()`."""

    ready: list[float] = field(default_factory=list)  # of each gradient
    bucket_bytes: list[int] = field(default_factory=list)
    called: list[float] = field(default_factory=list)  # call of each bucket's all-reduce
    started: list[float] = field(default_factory=list)  # when the link is free for it
    received: list[float] = field(default_factory=list)  # end of each bucket's all-reduce
    returned: float = 0.0

    def called_early(self) -> int:
        """Return how many all-reduces were called before the last gradient was ready."""
        return sum(seconds < max(self.ready) for seconds in self.called)


class TimedDDP:
    """A model in `DistributedDataParallel`, with hooks that record the times of its backward."""

    def __init__(self, device: torch.device, limit: float):
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=limit)
        self.model.register_comm_hook(None, self.all_reduce)
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: self.backward.ready.append(self.seconds())
            )
        self.backward, self.started_at = Backward(), 0.0
        self.link = Lock()  # the link carries one bucket after another

    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def all_reduce(self, _, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket instead of DDP, and record when this starts and ends."""
        record, number, called = self.backward, bucket.index(), self.seconds()
        buffer = bucket.buffer().div_(dist.get_world_size())
        seconds = buffer.nbytes / LINK if buffer.is_cpu else 0
        record.called.append(called)
        record.started.append(0.0)  # until the all-reduce ends
        record.received.append(0.0)
        record.bucket_bytes.append(buffer.nbytes)
        work = dist.all_reduce(buffer, async_op=True)

        def on_end(future: torch.futures.Future):
            with self.link:
                # The link is free when the bucket before has really arrived. On a busy machine,
                # that's later than planned.
                started = max(called, *record.received)
                time.sleep(max(0, started + seconds - self.seconds()))
                record.started[number], record.received[number] = started, self.seconds()
            return future.value()[0]

        return work.get_future().then(on_end)

    def run(self, inputs: torch.Tensor) -> Backward:
        """Run one forward and one backward, and return the times of the backward."""
        loss = self.model(inputs).square().mean()
        dist.barrier()  # so that all ranks start backward together
        self.backward, self.started_at = Backward(), time.perf_counter()
        loss.backward()
        self.backward.returned = self.seconds()
        self.model.zero_grad()
        return self.backward


def main(device: torch.device, options) -> None:
    """Run steps with each limit, alternately. Rank 0 prints and draws the fastest backward of each.

    Other programs on the machine only make a step slower. On a GPU, the times show when the CPU
    queued the work, not when the GPU did the work.
    """
    inputs = torch.randn(BATCH_SIZE, WIDTH, device=device)
    models = {limit: TimedDDP(device, limit) for limit in LIMITS}
    measured: dict[float, list[Backward]] = {limit: [] for limit in LIMITS}
    for step in range(WARM_UP + MEASURED):
        for limit, model in models.items():
            backward = model.run(inputs)
            if step >= WARM_UP:
                measured[limit].append(backward)
    if dist.get_rank() > 0:
        return
    fastest = {
        limit: min(backwards, key=lambda backward: backward.returned)
        for limit, backwards in measured.items()
    }
    rows = [
        [f"{limit:g}", len(backward.called), backward.called_early()]
        for limit, backward in fastest.items()
    ]
    head = ["bucket_cap_mb", "all-reduces", "called before the last gradient is ready"]
    print(show.table(head, rows))
    if options.plot:
        draw(fastest, options.plot)


def draw(backwards: dict[float, Backward], path: Path) -> None:
    """Draw one backward for each limit, below each other, on a common time axis."""
    figure = show.new_figure(4.9, 5)
    heights = [len(backward.called) + 2 for backward in backwards.values()]
    all_axes = figure.subplots(len(backwards), 1, sharex=True, height_ratios=heights)
    for axes, (limit, backward) in zip(all_axes, backwards.items(), strict=True):
        buckets = counted(len(backward.called), "bucket")
        axes.set_title(f"bucket_cap_mb={limit:g}: {buckets}", fontsize=10, loc="left")
        labels, ready = ["backward"], [1000 * seconds for seconds in backward.ready]
        axes.barh(0, max(ready), color=COLORS[5], height=0.6, label="backward computes")
        ticks = {"color": COLORS[7], "markersize": 11, "label": "a layer's gradients are ready"}
        axes.plot(ready, [0] * len(ready), "|", **ticks)
        for number, size in enumerate(backward.bucket_bytes):
            called, start, end = (
                1000 * times[number]
                for times in (backward.called, backward.started, backward.received)
            )
            waits, sends = ("waits for the link", "all-reduce") if number == 0 else (None, None)
            bar = {"height": 0.6, "color": COLORS[1]}
            axes.barh(number + 1, start - called, left=called, alpha=0.3, label=waits, **bar)
            axes.barh(number + 1, end - start, left=start, label=sends, **bar)
            labels.append(f"bucket {number + 1}\n{size / 2**20:.2f} MiB")
        line = {"color": COLORS[7], "linewidth": 2, "linestyle": "--"}
        axes.axvline(1000 * backward.returned, label="backward() returns", **line)
        axes.set_yticks(range(len(labels)), labels, fontsize=10)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    end = 1000 * max(backward.returned for backward in backwards.values())
    # The numbers are the same for any duration, because page_tools.py compares a picture's words.
    all_axes[-1].set_xticks(NUMBERED, NUMBERED, fontsize=10)
    all_axes[-1].set_xlim(0, max(end, NUMBERED[-1]) * 1.02)
    for axes in all_axes:
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    all_axes[-1].set_xlabel("ms since backward() was called, on rank 0", fontsize=10)
    handles, names = all_axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    show.save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        run_in_group(main, PROCESSES, Parser(__doc__, plot=True).parse_args())

"""Measure when DDP sends each bucket during backward, with one bucket and with several.

python -m accel_demo.anatomy.ddp.timeline
python -m accel_demo.anatomy.ddp.timeline --plot timeline.svg
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

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

PROCESSES, LAYERS, WIDTH, BATCH_SIZE = 2, 8, 512, 256
LIMITS = 1000, 2  # in MiB, for one bucket and for several
NUMBERED = 0, 10, 20, 30, 40  # ms on the time axis of the picture
WARM_UP, MEASURED = 4, 9  # steps; DDP rebuilds its buckets after the first one


@dataclass
class Backward:
    """Times of one backward on one rank, in seconds after the call of `backward()`."""

    ready: list[float] = field(default_factory=list)  # of each gradient
    bucket_bytes: list[int] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)  # start of each bucket's all-reduce
    received: list[float] = field(default_factory=list)  # end of each bucket's all-reduce
    returned: float = 0.0

    def sent_early(self) -> int:
        """Return how many all-reduces started before the last gradient was ready."""
        return sum(seconds < max(self.ready) for seconds in self.sent)


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

    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def all_reduce(self, _, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket instead of DDP, and record when this starts and ends."""
        record, number = self.backward, bucket.index()
        record.sent.append(self.seconds())
        record.received.append(0.0)  # until the all-reduce ends
        record.bucket_bytes.append(bucket.buffer().nbytes)
        buffer = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)

        def on_end(future: torch.futures.Future):
            record.received[number] = self.seconds()
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
    """Run steps with each limit, alternately. Rank 0 prints and draws a typical backward for each.

    Typical is the measured step whose `backward()` took the median time. On a GPU, the times show
    when the CPU queued the work, not when the GPU did the work.
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
    typical = {
        limit: sorted(backwards, key=lambda backward: backward.returned)[MEASURED // 2]
        for limit, backwards in measured.items()
    }
    rows = [
        [f"{limit:g}", len(backward.sent), backward.sent_early()]
        for limit, backward in typical.items()
    ]
    head = ["bucket_cap_mb", "all-reduces", "started before the last gradient was ready"]
    print(show.table(head, rows))
    if options.plot:
        draw(typical, options.plot)


def draw(backwards: dict[float, Backward], path: Path) -> None:
    """Draw one backward for each limit, below each other, on a common time axis."""
    figure = show.new_figure(4.9, 5)
    heights = [len(backward.sent) + 2 for backward in backwards.values()]
    all_axes = figure.subplots(len(backwards), 1, sharex=True, height_ratios=heights)
    for axes, (limit, backward) in zip(all_axes, backwards.items(), strict=True):
        buckets = counted(len(backward.sent), "bucket")
        axes.set_title(f"bucket_cap_mb={limit:g}: {buckets}", fontsize=10, loc="left")
        labels, ready = ["backward"], [1000 * seconds for seconds in backward.ready]
        axes.barh(0, max(ready), color=COLORS[5], height=0.6, label="backward computes")
        ticks = {"color": COLORS[7], "markersize": 11, "label": "a layer's gradients are ready"}
        axes.plot(ready, [0] * len(ready), "|", **ticks)
        for number, size in enumerate(backward.bucket_bytes):
            start, end = 1000 * backward.sent[number], 1000 * backward.received[number]
            name = "all-reduce" if number == 0 else None
            axes.barh(number + 1, end - start, 0.6, start, color=COLORS[1], label=name)
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

"""Measure the latency and the bandwidth of messages and of all-reduces between processes.

python tutorials/alpha_beta.py
python tutorials/alpha_beta.py --plot alpha_beta.svg

Ranks 0 and 1 send messages of several sizes back and forth. Half of a round trip is the time of one
message. Each repetition measures all sizes in random order, and the fastest repetition counts,
because other programs on the machine can only add time. The program fits the α–β model to the times
of the messages, and to those of `dist.all_reduce`.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group
from accel_demo.wording import byte_size, duration

SIZES = [64 * 8**power for power in range(7)]  # 64 bytes to 16 MiB
REPEATS, CALLS = 51, 5  # a repetition times five calls in a row
Seconds = dict[int, float]  # size in bytes -> seconds of the fastest repetition


@dataclass(frozen=True)
class Link:
    """A connection in the α–β model: a message of n bytes takes α + n · β seconds.

    α is the latency in seconds, and β is 1 / bandwidth, with the bandwidth in bytes per second.
    Source: Hockney, The communication challenge for MPP, https://doi.org/10.1016/S0167-8191(06)80021-9
    """

    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Return the seconds that one message of `size` bytes takes."""
        return self.latency + size / self.bandwidth

    def ring_all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of 2 · (ranks − 1) messages of size / ranks bytes, in sequence."""
        return 2 * (ranks - 1) * self.message(size / ranks)


# Latency of one step of a ring, and bandwidth in one direction. NCCL chooses an algorithm with its
# own α–β model, and these are its values. An H100 has 18 NVLinks, and an A100 has 12.
# Sources in NVIDIA/nccl at 5067397: src/graph/tuning.cc, line 653 (the formula), and lines 156 to
# 175 (the latencies, for the protocol "Simple"); src/graph/topo.h, lines 19 to 35 (NVLink, and the
# network with 100 Gbit/s); src/graph/topo.cc, line 554 (PCIe, in units of 100 Mbit/s per lane) and
# line 418 (other networks: the nominal bandwidth).
NCCL_LINKS = {
    "NVLink of an H100": Link(3.4e-6, 18 * 20.6e9),
    "NVLink of an A100": Link(3.4e-6, 12 * 20e9),
    "PCIe 5.0, 16 lanes": Link(5.7e-6, 16 * 24e9 / 8),
    "InfiniBand NDR, 400 Gbit/s": Link(14e-6, 400e9 / 8),
    "Ethernet, 100 Gbit/s": Link(14e-6, 12e9),
    "Ethernet, 10 Gbit/s": Link(14e-6, 10e9 / 8),
}


def fit_link(seconds: Seconds) -> Link:
    """Fit a `Link` to measured times, with least squares of the relative errors.

    Squares of absolute errors would ignore the short messages, which show the latency.
    """
    rows = [[1 / time, size / time] for size, time in seconds.items()]  # each row · (α, β) = 1
    target = torch.ones(len(rows), 1, dtype=torch.float64)
    answer = torch.linalg.lstsq(torch.tensor(rows, dtype=torch.float64), target).solution
    latency, seconds_per_byte = answer.flatten().tolist()
    return Link(latency, 1 / seconds_per_byte)


def measure(device: torch.device, repeats: int = REPEATS) -> tuple[Seconds, Seconds]:
    """Return the seconds of one message, and of `dist.all_reduce`, for each size.

    All ranks must call this function. The times are those of rank 0. Raises `ValueError` if there
    is only one rank.
    """
    if dist.get_world_size() < 2:
        raise ValueError("measure needs at least two processes")
    tensors = {size: torch.zeros(size // 4, device=device) for size in SIZES}  # float32
    calls = [_round_trip, dist.all_reduce]
    times = [{size: [] for size in SIZES} for _ in calls]
    steps = range(-2, repeats)  # the first two are a warm-up
    disable = None if dist.get_rank() == 0 else True  # None: a bar on a terminal only
    for repeat in tqdm(steps, desc="alpha_beta", unit="repeat", disable=disable):
        for size in random.Random(repeat).sample(SIZES, len(SIZES)):
            for call, by_size in zip(calls, times, strict=True):
                seconds = _seconds(call, tensors[size])
                if repeat >= 0:
                    by_size[size].append(seconds)
    messages, all_reduces = (
        {size: min(values) for size, values in by_size.items()} for by_size in times
    )
    return {size: value / 2 for size, value in messages.items()}, all_reduces


def _round_trip(tensor: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _seconds(call: Callable, tensor: torch.Tensor) -> float:
    dist.barrier()
    _synchronize(tensor)
    started_at = time.perf_counter()
    for _ in range(CALLS):
        call(tensor)
    _synchronize(tensor)
    return (time.perf_counter() - started_at) / CALLS


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:  # calls on a GPU return early
        torch.cuda.synchronize(tensor.device)


def main(device: torch.device, options) -> None:
    messages, all_reduces = measure(device)
    if dist.get_rank() > 0:
        return
    ranks = dist.get_world_size()
    measured = {"one message": messages, f"all_reduce on {ranks} ranks": all_reduces}
    links = {name: fit_link(seconds) for name, seconds in measured.items()}
    rows = []
    for size in SIZES:
        pairs = [(measured[name][size], link.message(size)) for name, link in links.items()]
        rows.append([byte_size(size), *(duration(seconds) for pair in pairs for seconds in pair)])
    print(show.table(["size", *(head for name in links for head in (name, "fit"))], rows))
    for name, link in links.items():
        print(f"\n{name}: {formula(link)}")
    if options.plot:
        draw(measured, options.plot)


def formula(link: Link) -> str:
    """Describe the fit. At the size that it names, latency and bandwidth cost the same time."""
    size = byte_size(link.latency * link.bandwidth)
    line = f"{duration(link.latency)} + size / ({link.bandwidth / 1e9:.3g} GB/s)"
    return f"{line}: flat well below {size}, linear well above"


def draw(measured: dict[str, Seconds], path: Path) -> None:
    """Draw the measured times as points, and the fitted model as a line."""
    figure = show.new_figure(6.2, 4.4)
    axes = figure.subplots()
    sizes = [SIZES[0] * (SIZES[-1] / SIZES[0]) ** (step / 100) for step in range(101)]
    for color, (name, seconds) in zip(show.COLORS, measured.items(), strict=False):
        link = fit_link(seconds)
        points = [1e3 * seconds[size] for size in SIZES]
        axes.plot(SIZES, points, "o", color=color, label=f"{name}, measured")
        line = [1e3 * link.message(size) for size in sizes]
        axes.plot(sizes, line, color=color, label=f"{name}, fit")
    axes.loglog()
    axes.set(xlabel="size of the tensor in bytes", ylabel="time of one call in ms")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10)
    show.save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        options = Parser(__doc__, plot=True, processes=2, least=2).parse_args()
        run_in_group(main, options.processes, options)

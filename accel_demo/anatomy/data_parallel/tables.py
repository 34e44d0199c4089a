"""What `python -m accel_demo.anatomy.data_parallel` prints: a step, the bias, VGG in two parts."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from accel_demo import show
from accel_demo.anatomy.data_parallel import pictures
from accel_demo.anatomy.data_parallel.phases import data_parallel
from accel_demo.anatomy.data_parallel.scatter_gather import Event, chunk_sizes, mean_over_samples
from accel_demo.anatomy.flags import command_line, read
from accel_demo.errors import UserError
from accel_demo.models import VGG11

FLOAT = 4  # bytes of a float32
SAMPLES = 30  # of the bias: over 8 replicas they do not divide


def main(description: str | None) -> None:
    """Print one of the three tables, and draw its pictures."""
    parser = command_line(description)
    parser.add_argument("what", nargs="?", default="step", choices=["step", "bias", "parts"])
    help = "default: 4; for the bias 8, for the parts 2"
    parser.add_argument("--replicas", type=int, metavar="N", help=help)
    help = "of the step; default: 10"
    parser.add_argument("--batch-size", type=int, metavar="N", help=help)
    options = read(parser)
    replicas = options.replicas
    if replicas is None:
        replicas = {"step": 4, "bias": 8, "parts": 2}[options.what]
    if options.batch_size is not None and options.what != "step":
        raise UserError(f"--batch-size is for the step only, and not for {options.what}")
    batch_size = 10 if options.batch_size is None else options.batch_size
    for name, number in (("--replicas", replicas), ("--batch-size", batch_size)):
        if number < 1:
            raise UserError(f"{name} must be at least 1, got {number}")
    if options.what == "step":
        draw = show_step(replicas, batch_size)
    elif options.what == "bias":
        draw = show_bias(replicas)
    else:
        draw = show_parts(replicas)
    if options.plot:
        show.save(draw(), options.plot)


def show_step(replicas: int, batch_size: int):
    """Print what each replica gets and does in one step, and what its device holds then."""
    record, held = train_step(replicas, batch_size)
    used = 1 + max(event.replica for event in record)
    columns = [f"replica {replica}" for replica in range(used)]
    rows = []
    for phase in ("scatter", "replicate", "parallel_apply", "gather", "backward"):
        events = [event for event in record if event.phase == phase]
        threads = sorted({event.thread for event in events})
        rows.append(
            [
                f"`{phase}`" if phase != "backward" else phase,
                threads[0] if len(threads) == 1 else f"{len(threads)} threads",
                *(in_words(phase, events, replica) for replica in range(used)),
                sum(event.size for event in events),
            ]
        )
    print(show.table(["phase", "thread", *columns, "bytes moved"], rows))
    print("\nWhat the device of each replica then holds, in bytes (without activations):\n")
    rows = [[what, *sizes] for what, sizes in held.items()]
    rows.append(["together", *map(sum, zip(*held.values(), strict=True))])
    print(show.table(["", *columns], rows))
    return partial(pictures.draw_step, record, used)


def train_step(replicas: int, batch_size: int) -> tuple[list[Event], dict[str, list[int]]]:
    """One step of Adam, the loss after the gather: its events, and the bytes on each device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(net.parameters())
    inputs, labels = torch.randn(batch_size, 6), torch.randn(batch_size, 3)
    record: list[Event] = []
    outputs = data_parallel(net, inputs, replicas, record=record)
    F.mse_loss(outputs, labels).backward()
    optimizer.step()

    used = 1 + max(event.replica for event in record)
    averages = [one[name] for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]

    def on_the_first(*tensors: Any) -> list[int]:
        return [FLOAT * sum(tensor.numel() for tensor in tensors)] + [0] * (used - 1)

    def on_each(phase: str) -> list[int]:
        sizes = [0] * used
        for event in record:
            if event.phase == phase:
                sizes[event.replica] += FLOAT * sum(map(math.prod, event.shapes))
        return sizes

    return record, {
        "the batch and its labels": on_the_first(inputs, labels),
        "its part of the batch": [0, *on_each("scatter")[1:]],
        "the module, or its copy": on_each("replicate"),
        "its output": on_each("parallel_apply"),
        "all outputs, gathered": on_the_first(outputs),
        "gradients of the copy": [0, *on_each("backward")[1:]],
        "their sum, in `.grad`": on_the_first(*(one.grad for one in net.parameters())),
        "Adam's two averages": on_the_first(*averages),
    }


def in_words(phase: str, events: list[Event], replica: int) -> str:
    """What a replica got or gave in a phase."""
    shapes = [shape for event in events if event.replica == replica for shape in event.shapes]
    if phase == "replicate":
        return f"{len(shapes)} tensors{', shared' if replica == 0 else ''}"
    if phase == "backward":
        return f"{len(shapes)} gradients"
    return ", ".join("×".join(map(str, shape)) for shape in shapes)


class LossInside(nn.Module):
    """A net whose forward computes the loss as well, so that every replica computes one."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(self.net(batch["inputs"]), batch["labels"])


def loss_after_gather(net, batch, replicas):
    return F.mse_loss(data_parallel(net, batch["inputs"], replicas), batch["labels"])


def loss_inside_forward(net, batch, replicas):
    losses = data_parallel(LossInside(net), batch, replicas)  # one for each replica
    return losses.mean()


def loss_inside_forward_weighted(net, batch, replicas):
    losses = data_parallel(LossInside(net), batch, replicas)
    return mean_over_samples(losses, chunk_sizes(len(batch["inputs"]), replicas))


LOSSES = {
    "after the gather": loss_after_gather,
    "inside, plain mean": loss_inside_forward,
    "inside, weighted mean": loss_inside_forward_weighted,
}


def show_bias(most: int):
    """Print how far the gradient is off the full batch's, for up to so many replicas."""
    errors = {name: [] for name in LOSSES}
    rows = []
    for replicas in range(1, most + 1):
        for name, loss in LOSSES.items():
            errors[name].append(gradient_error(loss, replicas))
        chunks = ", ".join(map(str, chunk_sizes(SAMPLES, replicas)))
        rows.append([replicas, chunks, *(in_digits(errors[name][-1]) for name in LOSSES)])
    print(f"How far the gradient of {SAMPLES} samples is off, by where the loss is computed:\n")
    print(show.table(["replicas", "samples of each", *LOSSES], rows))
    return partial(pictures.draw_bias, sample_weights(most), chunk_sizes(SAMPLES, most), errors)


def gradient_error(loss, replicas: int) -> float:
    """The largest difference of a gradient from that of the whole batch in one go."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    batch = {"inputs": torch.randn(SAMPLES, 6), "labels": torch.randn(SAMPLES, 3)}
    parameters = list(net.parameters())
    right = torch.autograd.grad(LossInside(net)(batch), parameters)
    found = torch.autograd.grad(loss(net, batch, replicas), parameters)
    return largest_difference(found, right)


def largest_difference(found: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> float:
    """Over all tensors; NaN where one is in them, which Python's own max may pass over."""
    differences = [(one - other).abs().max() for one, other in zip(found, right, strict=True)]
    return torch.stack(differences).max().item()


def in_digits(error: float) -> str:
    if error < 1e-6:
        return "below 1e-6"
    return f"{error:.0e}" if error < 5e-4 else f"{error:.3f}"


class Mean(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.mean()


def sample_weights(replicas: int) -> list[float]:
    """How much each sample counts in the plain mean of the replicas' means."""
    values = torch.zeros(SAMPLES, requires_grad=True)
    data_parallel(Mean(), values, replicas).mean().backward()
    return cast(torch.Tensor, values.grad).tolist()


def whole(net: VGG11, images: torch.Tensor, replicas: int, record: list | None = None):
    """VGG in one call: the net is what is replicated."""
    return data_parallel(net, images, replicas, record=record)


def in_parts(net: VGG11, images: torch.Tensor, replicas: int, record: list | None = None):
    """VGG as a forward that calls its two parts in parallel, one after the other."""
    features = data_parallel(net.features, images, replicas, record=record)
    return data_parallel(net.classifier, features, replicas, record=record)


def show_parts(replicas: int):
    """Print how often VGG is replicated and gathered in one forward, whole and in two parts."""
    torch.manual_seed(0)
    net, images = VGG11(channels=3, dropout=0.0), torch.randn(8, 3, 32, 32)
    net, images = net.double(), images.double()  # what is off is then no rounding
    expected = torch.autograd.grad(net(images).logsumexp(1).mean(), list(net.parameters()))
    rows, moved = [], {}
    for name, forward in {"the whole net": whole, "features, then classifier": in_parts}.items():
        record: list[Event] = []
        loss = forward(net, images, replicas, record).logsumexp(1).mean()
        found = torch.autograd.grad(loss, list(net.parameters()))
        error = largest_difference(found, expected)
        moved[name] = {  # half the bytes of float64: those of float32
            phase: sum(event.size for event in record if event.phase == phase) // 2
            for phase in ("replicate", "scatter", "gather")
        }
        times = [
            sum(event.phase == phase and event.replica == 0 for event in record)
            for phase in ("replicate", "gather")
        ]
        threads = sum(event.phase == "parallel_apply" for event in record)
        rows.append([name, *times, threads, *moved[name].values(), in_digits(error)])
    head = ["wrapped", "replications", "gathers", "threads", "bytes replicated", "scattered"]
    print(show.table([*head, "gathered", "gradient off by"], rows))
    return partial(pictures.draw_parts, moved)

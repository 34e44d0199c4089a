"""Print the tables of `python -m accel_demo.anatomy.data_parallel`: step, bias and parts.

Each `show_…` function prints one table and returns a function that draws its picture.
"""

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from accel_demo import show
from accel_demo.anatomy.data_parallel import picture
from accel_demo.anatomy.data_parallel.phases import data_parallel
from accel_demo.anatomy.data_parallel.scatter_gather import (
    FORWARD_PHASES,
    PHASES,
    REPLICATE_BACKWARD,
    Event,
    chunk_sizes,
    mean_over_samples,
)
from accel_demo.errors import UserError
from accel_demo.models import VGG11
from accel_demo.options import Parser

SAMPLES = 30  # samples in the table `bias`; 8 replicas cannot split them equally
DEFAULT_REPLICAS = {"step": 4, "bias": 8, "parts": 2}


def main(description: str | None) -> None:
    """Print one of the three tables. With `--plot`, also draw its picture."""
    parser = Parser(description, plot=True)
    help = "which table to print (default: step)"
    parser.add_argument("table", nargs="?", default="step", choices=[*DEFAULT_REPLICAS], help=help)
    help = "number of replicas (default: 4 for step, 8 for bias, 2 for parts)"
    parser.add_argument("--replicas", type=int, metavar="N", help=help)
    help = "batch size, for step only (default: 10)"
    parser.add_argument("--batch-size", type=int, metavar="N", help=help)
    options = parser.parse_args()
    if options.batch_size is not None and options.table != "step":
        raise UserError(f"--batch-size is for step only, not for {options.table}")
    replicas = DEFAULT_REPLICAS[options.table] if options.replicas is None else options.replicas
    batch_size = 10 if options.batch_size is None else options.batch_size
    for flag, number in (("--replicas", replicas), ("--batch-size", batch_size)):
        if number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    if options.table == "step":
        draw = show_step(replicas, batch_size)
    else:
        draw = show_bias(replicas) if options.table == "bias" else show_parts(replicas)
    if options.plot:
        show.save(draw(), options.plot)


def show_step(replicas: int, batch_size: int):
    """Print what each replica does in one step."""
    record = train_step(replicas, batch_size)
    used = 1 + max(event.replica for event in record)
    columns = [f"replica {replica}" for replica in range(used)]
    rows = []
    for phase in PHASES:
        events = [event for event in record if event.phase == phase]
        threads = sorted({event.thread for event in events})
        name = f"`{phase}`" if phase in FORWARD_PHASES else phase
        thread = threads[0] if len(threads) == 1 else f"{len(threads)} threads"
        cells = [shapes_in_words(phase, events, replica) for replica in range(used)]
        rows.append([name, thread, *cells, sum(event.size for event in events)])
    print(show.table(["phase", "thread", *columns, "bytes moved"], rows))
    return partial(picture.draw_step, record, used)


def train_step(replicas: int, batch_size: int) -> list[Event]:
    """Train for one step, with the loss computed after the gather. Return the events."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    inputs, labels = torch.randn(batch_size, 6), torch.randn(batch_size, 3)
    record: list[Event] = []
    F.mse_loss(data_parallel(net, inputs, replicas, record=record), labels).backward()
    return record


def shapes_in_words(phase: str, events: list[Event], replica: int) -> str:
    """Describe the tensors of one replica in one phase, for a cell of the table."""
    shapes = [shape for event in events if event.replica == replica for shape in event.shapes]
    if phase == "replicate":
        return f"{len(shapes)} tensors{', shared' if replica == 0 else ''}"
    if phase == REPLICATE_BACKWARD:
        return f"{len(shapes)} gradients"
    return ", ".join("×".join(map(str, shape)) for shape in shapes)


class LossInside(nn.Module):
    """A model that computes the loss in its forward, so that every replica returns a loss."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(self.net(batch["inputs"]), batch["labels"])


def loss_after_gather(net, batch, replicas):
    return F.mse_loss(data_parallel(net, batch["inputs"], replicas), batch["labels"])


def loss_inside_forward(net, batch, replicas):
    losses = data_parallel(LossInside(net), batch, replicas)  # one loss for each replica
    return losses.mean()


def loss_inside_forward_weighted(net, batch, replicas):
    losses = data_parallel(LossInside(net), batch, replicas)
    return mean_over_samples(losses, chunk_sizes(len(batch["inputs"]), replicas))


LOSSES = {
    "after the gather": loss_after_gather,
    "inside, plain mean": loss_inside_forward,
    "inside, weighted mean": loss_inside_forward_weighted,
}


def show_bias(most_replicas: int):
    """For each way to compute the loss, print the gradient error with 1, 2, … replicas."""
    errors = {name: [] for name in LOSSES}
    rows = []
    for replicas in range(1, most_replicas + 1):
        for name, loss in LOSSES.items():
            errors[name].append(gradient_error(loss, replicas))
        chunks = ", ".join(map(str, chunk_sizes(SAMPLES, replicas)))
        rows.append([replicas, chunks, *(error_in_digits(errors[name][-1]) for name in LOSSES)])
    print(f"Error of the gradient of {SAMPLES} samples, by where the loss is computed:\n")
    print(show.table(["replicas", "samples of each", *LOSSES], rows))
    weights, sizes = sample_weights(most_replicas), chunk_sizes(SAMPLES, most_replicas)
    return partial(picture.draw_bias, weights, sizes, errors)


def gradient_error(loss, replicas: int) -> float:
    """Return the largest difference from the gradient that is computed without replicas."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    batch = {"inputs": torch.randn(SAMPLES, 6), "labels": torch.randn(SAMPLES, 3)}
    parameters = list(net.parameters())
    expected = torch.autograd.grad(LossInside(net)(batch), parameters)
    gradients = torch.autograd.grad(loss(net, batch, replicas), parameters)
    return largest_difference(gradients, expected)


def largest_difference(tensors: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the largest absolute difference, or NaN if any is NaN (Python's `max` may skip it)."""
    differences = [(a - b).abs().max() for a, b in zip(tensors, expected, strict=True)]
    return torch.stack(differences).max().item()


def error_in_digits(error: float) -> str:
    if error < 1e-6:
        return "below 1e-6"
    return f"{error:.0e}" if error < 5e-4 else f"{error:.3f}"


class Mean(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.mean()


def sample_weights(replicas: int) -> list[float]:
    """Return the weight of each sample in the plain mean of the replicas' means."""
    values = torch.zeros(SAMPLES, requires_grad=True)
    data_parallel(Mean(), values, replicas).mean().backward()
    return cast(torch.Tensor, values.grad).tolist()


def whole(net: VGG11, images: torch.Tensor, replicas: int, record: list | None = None):
    """Call VGG as one module, so that the whole model is replicated once."""
    return data_parallel(net, images, replicas, record=record)


def in_parts(net: VGG11, images: torch.Tensor, replicas: int, record: list | None = None):
    """Call the two parts of VGG one after the other, so that each part is replicated separately."""
    features = data_parallel(net.features, images, replicas, record=record)
    return data_parallel(net.classifier, features, replicas, record=record)


def show_parts(replicas: int):
    """Compare what one forward copies and sends if VGG is wrapped as a whole or in two parts."""
    torch.manual_seed(0)
    net, images = VGG11(channels=3, dropout=0.0), torch.randn(8, 3, 32, 32)
    net, images = net.double(), images.double()  # keeps rounding errors far below real errors
    expected = torch.autograd.grad(net(images).logsumexp(1).mean(), list(net.parameters()))
    rows, moved = [], {}
    for name, forward in {"the whole net": whole, "features, then classifier": in_parts}.items():
        record: list[Event] = []
        loss = forward(net, images, replicas, record).logsumexp(1).mean()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        error = largest_difference(gradients, expected)
        moved[name] = {  # half the float64 bytes: what float32 would need
            phase: sum(event.size for event in record if event.phase == phase) // 2
            for phase in ("replicate", "scatter", "gather")
        }
        on_replica_0 = [event.phase for event in record if event.replica == 0]
        calls = [on_replica_0.count(phase) for phase in ("replicate", "gather")]
        threads = sum(event.phase == "parallel_apply" for event in record)
        rows.append([name, *calls, threads, *moved[name].values(), error_in_digits(error)])
    head = ["wrapped", "replications", "gathers", "threads", "bytes replicated", "scattered"]
    print(show.table([*head, "gathered", "error of the gradient"], rows))
    return partial(picture.draw_parts, moved)

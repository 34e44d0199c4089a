"""Print the tables of `python -m accel_demo.anatomy.data_parallel`: step and bias.

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
from accel_demo.options import Parser

SAMPLES = 30  # samples in the table `bias`; 8 replicas cannot split them equally
DEFAULT_REPLICAS = {"step": 4, "bias": 8}


def main(description: str | None) -> None:
    """Print one of the two tables. With `--plot`, also draw its picture."""
    parser = Parser(description, plot=True)
    help = "which table to print (default: step)"
    parser.add_argument("table", nargs="?", default="step", choices=[*DEFAULT_REPLICAS], help=help)
    help = "number of replicas (default: 4 for step, 8 for bias)"
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
    is_step = options.table == "step"
    draw = show_step(replicas, batch_size) if is_step else show_bias(replicas)
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
    print(f"Relative error of the gradient of {SAMPLES} samples, by where the loss is computed:\n")
    print(show.table(["replicas", "samples of each", *LOSSES], rows))
    weights, sizes = sample_weights(most_replicas), chunk_sizes(SAMPLES, most_replicas)
    return partial(picture.draw_bias, weights, sizes, errors)


def gradient_error(loss, replicas: int) -> float:
    """Return the largest difference from the gradient that is computed without replicas.

    It is relative to the largest element of that gradient.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    batch = {"inputs": torch.randn(SAMPLES, 6), "labels": torch.randn(SAMPLES, 3)}
    parameters = list(net.parameters())
    expected = torch.autograd.grad(LossInside(net)(batch), parameters)
    gradients = torch.autograd.grad(loss(net, batch, replicas), parameters)
    largest = max(gradient.abs().max().item() for gradient in expected)
    return largest_difference(gradients, expected) / largest


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

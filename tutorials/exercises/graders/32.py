"""Grade exercise 32: compare outputs, gradients and running statistics with the whole batch."""

import sys
from collections.abc import Callable
from pathlib import Path

from grading import (
    Wrong,
    call_without_collectives,
    dist,
    grade,
    import_answer,
    naming_errors,
    torch,
)

FEATURES, LENGTH, MOMENTUM, EPS = 3, 6, 0.25, 1e-3
SEQUENCES = {1: (5,), 2: (4, 2), 3: (4, 3, 1)}  # of each rank, by the number of ranks
RIGHT = "on 1, 2 and 3 processes, the ranks compute what one process does with all sequences"
CLOSE = 1e-9  # float64 results of sums in another order differ by much less
CONSTANT = (
    "the outputs are right, but the gradient of the inputs is that of constant statistics: it must "
    "also pass through the mean and the variance"
)
OWN_PATH = (
    "the outputs are right, but the gradient of the inputs contains only what this rank's losses "
    "contribute. The inputs also change the outputs on the other ranks"
)


def observe(answer: Path, device) -> None:
    layer = import_answer(answer).SequenceNorm(FEATURES, momentum=MOMENTUM, eps=EPS)
    layer = layer.double().to(device)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        layer.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    statistics = Statistics(device)
    for step in range(2):
        compare_step(layer, Batch(step, device), statistics)
    layer.eval()
    compare_evaluation(layer, Batch(3, device), statistics)


class Batch:
    """The sequences of all ranks, and the part of this rank."""

    def __init__(self, step: int, device):
        rank, sequences = dist.get_rank(), SEQUENCES[dist.get_world_size()]
        generator = torch.Generator().manual_seed(32 + step)
        shape, total = (LENGTH, FEATURES), sum(sequences)
        inputs = torch.randn(total, *shape, generator=generator, dtype=torch.float64)
        inputs += torch.linspace(-2, 3, total, dtype=torch.float64)[:, None, None]
        lengths = torch.arange(total) * 2 % LENGTH + 1
        self.is_real = (torch.arange(LENGTH) < lengths[:, None]).to(device)
        inputs[torch.arange(LENGTH) >= lengths[:, None]] = 100.0  # padding that must not count
        self.inputs = inputs.to(device)
        factors = torch.randn(total, *shape, generator=generator, dtype=torch.float64)
        self.factors = factors.to(device)
        begin = sum(sequences[:rank])
        self.own = slice(begin, begin + sequences[rank])
        self.parts = [part.to(device) for part in torch.arange(total).split(sequences)]


class Statistics:
    """The running statistics of one process with all sequences, and wrong ones by name."""

    def __init__(self, device):
        zeros, ones = (make(FEATURES, dtype=torch.float64) for make in (torch.zeros, torch.ones))
        self.means = {name: zeros.clone().to(device) for name in ("right", "own")}
        names = ("right", "biased", "own count", "own")
        self.variances = {name: ones.clone().to(device) for name in names}

    def update(self, batch: Batch) -> None:
        rows, own = rows_of(batch, slice(None)), rows_of(batch, batch.own)
        variance = rows.var(0, correction=0)
        own_factor = len(own) / max(len(own) - 1, 1)
        for name, mean in (("right", rows.mean(0)), ("own", own.mean(0))):
            self.means[name].lerp_(mean, MOMENTUM)
        for name, value in (
            ("right", rows.var(0)),
            ("biased", variance),
            ("own count", variance * own_factor),
            ("own", own.var(0, correction=0) * own_factor),
        ):
            self.variances[name].lerp_(value, MOMENTUM)


def rows_of(batch: Batch, part, inputs=None):
    inputs = batch.inputs if inputs is None else inputs
    return inputs[part][batch.is_real[part]]


def compare_step(layer, batch: Batch, statistics: Statistics) -> None:
    layer.train()
    layer.zero_grad()
    rank, own = dist.get_rank(), batch.own
    inputs = batch.inputs[own].clone().requires_grad_()
    with naming_errors("forward raises"):
        outputs = layer(inputs, batch.is_real[own])
    if not isinstance(outputs, torch.Tensor) or outputs.shape != inputs.shape:
        got = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else repr(outputs)[:60]
        raise Wrong(f"forward must return a tensor with the shape of the inputs, got {got}")
    whole = batch.inputs.clone().requires_grad_()
    expected = normalized(layer, batch, whole, *moments(rows_of(batch, slice(None), whole)))
    if not is_close(outputs, expected[own]):
        raise Wrong(f"on rank {rank}, {reason_for(outputs, layer, batch)}")
    if outputs.requires_grad:
        with naming_errors("backward raises"):
            (outputs * batch.factors[own]).sum().backward()
    compare_gradients(inputs.grad, layer, batch, whole, expected)
    statistics.update(batch)
    compare_statistics(layer, statistics)


def moments(rows):
    mean = rows.mean(0)
    return mean, (rows - mean).square().mean(0)


def normalized(layer, batch: Batch, inputs, mean, variance, part=slice(None)):
    outputs = (inputs - mean) / (variance + EPS).sqrt() * layer.weight.detach()
    return (outputs + layer.bias.detach()) * batch.is_real[part][..., None]


def reason_for(outputs, layer, batch: Batch) -> str:
    """Return what is wrong with the outputs."""
    own, whole = rows_of(batch, batch.own), rows_of(batch, slice(None))
    parts = [rows_of(batch, part) for part in batch.parts]
    means = torch.stack([part.mean(0) for part in parts])
    variances = torch.stack([part.var(0, correction=0) for part in parts])
    counts = torch.tensor([[len(part)] for part in parts], device=means.device)
    sequences = torch.tensor([[len(part)] for part in batch.parts], device=means.device)
    mean, variance = moments(whole)
    weighted = (variances * counts).sum(0) / len(whole)
    uneven = "the ranks have different numbers of real positions"
    by_sequences = (means * sequences).sum(0) / sequences.sum()
    rows_and_padding = batch.inputs.flatten(0, 1)
    candidates = {
        "the statistics are those of this rank's own sequences": moments(own),
        "the padding is counted in the statistics": moments(rows_and_padding),
        "the variance is the average of the ranks' variances. It leaves out how far the ranks' "
        "means are apart": (mean, weighted),
        "the variance is the average of the ranks' variances, which leaves out how far the ranks' "
        f"means are apart; also, {uneven}": (mean, variances.mean(0)),
        f"the mean is the average of the ranks' means, but {uneven}": (means.mean(0), None),
        f"the mean is weighted by the numbers of sequences, but {uneven}": (by_sequences, None),
        "the variance is the unbiased one, but outputs are normalized with the biased one": (
            mean,
            whole.var(0),
        ),
    }
    others = variance, weighted, variances.mean(0)
    for reason, (a_mean, a_variance) in candidates.items():
        around = (whole - a_mean).square().mean(0)
        for each in (around, *others) if a_variance is None else (a_variance,):
            value = normalized(layer, batch, batch.inputs[batch.own], a_mean, each, batch.own)
            if is_close(outputs, value):
                return reason
    off = (outputs - normalized(layer, batch, batch.inputs, mean, variance)[batch.own]).abs().max()
    return f"the outputs differ from those of one process with all sequences by {off.item():.1e}"


def compare_gradients(gradient, layer, batch: Batch, whole, expected) -> None:
    own, ranks = batch.own, dist.get_world_size()
    (expected * batch.factors).sum().backward()
    right = whole.grad[own]
    if gradient is not None and is_close(gradient, right):
        return
    if gradient is None:
        raise Wrong("the outputs are right, but backward computes no gradient of the inputs")
    for factor, size in ((ranks, "large"), (1 / ranks, "small")):
        if is_close(gradient, right * factor):
            raise Wrong(f"the gradient of the inputs is {ranks} times too {size}")
    if is_close(gradient, gradient_of(layer, batch, constant_moments)):
        raise Wrong(CONSTANT)
    own_paths = [gradient_of(layer, batch, each) for each in (own_moments, partly_own_moments)]
    if any(is_close(gradient, each) for each in own_paths):
        raise Wrong(OWN_PATH)
    if is_close(gradient, gradient_of(layer, batch, half_constant_moments(0))):
        raise Wrong("the outputs are right, but the gradient doesn't pass through the mean")
    if is_close(gradient, gradient_of(layer, batch, half_constant_moments(1))):
        raise Wrong("the outputs are right, but the gradient doesn't pass through the variance")
    off = (gradient - right).abs().max().item()
    raise Wrong(f"the outputs are right, but the gradient of the inputs is off by up to {off:.1e}")


def gradient_of(layer, batch: Batch, moments_of: Callable):
    """Return the gradient of this rank's inputs with other statistics of equal value."""
    inputs = batch.inputs.clone().requires_grad_()
    mean, variance = moments_of(batch, inputs)
    outputs = normalized(layer, batch, inputs, mean, variance)
    part = batch.own if moments_of in (own_moments, partly_own_moments) else slice(None)
    (outputs * batch.factors)[part].sum().backward()
    return inputs.grad[batch.own]


def constant_moments(batch: Batch, inputs):
    return moments(rows_of(batch, slice(None), inputs).detach())


def own_moments(batch: Batch, inputs):
    return moments(rows_of(batch, slice(None), inputs))


def partly_own_moments(batch: Batch, inputs):
    """Return the moments as sums of this rank's part, with a gradient, and the others', without."""
    everything, own = rows_of(batch, slice(None), inputs), rows_of(batch, batch.own, inputs)
    constant_mean, constant_variance = moments(everything.detach())

    def plus_others(own_sum, total):
        return own_sum + total - own_sum.detach()

    mean = plus_others(own.sum(0), constant_mean * len(everything)) / len(everything)
    own_squares = (own - mean).square().sum(0)
    return mean, plus_others(own_squares, constant_variance * len(everything)) / len(everything)


def half_constant_moments(which: int) -> Callable:
    def make(batch: Batch, inputs):
        rows = rows_of(batch, slice(None), inputs)
        mean, variance = moments(rows)
        if which == 0:
            mean = mean.detach()
            return mean, (rows - mean).square().mean(0)
        return mean, variance.detach()

    return make


def compare_statistics(layer, statistics: Statistics) -> None:
    for name, known in (
        ("running_mean", statistics.means),
        ("running_var", statistics.variances),
    ):
        value = getattr(layer, name)
        if is_close(value, known["right"]):
            continue
        reasons = {
            "own": f"{name} comes from the rank's own sequences only",
            "biased": f"{name} uses the biased variance: it must be multiplied by n / (n - 1)",
            "own count": f"{name} is multiplied by n / (n - 1) with this rank's own n",
        }
        for wrong, reason in reasons.items():
            if wrong in known and is_close(value, known[wrong]):
                raise Wrong(reason)
        off = (value - known["right"]).abs().max().item()
        raise Wrong(f"{name} differs from that of one process by {off:.1e}")


def compare_evaluation(layer, batch: Batch, statistics: Statistics) -> None:
    own = batch.inputs[batch.own], batch.is_real[batch.own]
    with torch.no_grad(), naming_errors("in evaluation, forward raises"):
        try:
            outputs = call_without_collectives(layer, *own)
        except Wrong:
            raise Wrong("in evaluation, the ranks wait for each other") from None
    right = statistics.means["right"], statistics.variances["right"]
    if not is_close(outputs, normalized(layer, batch, batch.inputs, *right)[batch.own]):
        raise Wrong("in evaluation, the outputs are not normalized with the running statistics")


def is_close(tensor, expected) -> bool:
    if tensor.shape != expected.shape:
        return False
    return bool((tensor.detach() - expected).abs().max() <= CLOSE * (1 + expected.abs().max()))


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(2, 3, 1)))

"""Look at the graph of a loss before the backward pass, which frees it."""

import sys

from .events import guarded
from .weights import number_of
from .windows import optimizers, parameters_of

MOST_NODES = 10_000
# Names of functions in the graph
SUM, QUOTIENT, PRODUCT = "AddBackward0", "DivBackward0", "MulBackward0"
PASSED_ON = ("MeanBackward0", "SumBackward0", "ToCopyBackward0")
MEAN = 1  # the value of `reduction` in the graph
UNKNOWN = {
    "loss": None,
    "divisions": 1,
    "has_factor": True,
    "is_for_inputs": False,
    "targets": None,
}


@guarded
def about(micro_batches: int, is_early: bool, loss=None, *_) -> dict:
    """Return properties of a loss. `loss` is a number of its bits, if it is an early one.

    `divisions` is how often the loss is divided by the number of micro-batches: 0, 1 or 2 times. By
    Accelerate, by the script, or by both in a row. Any factor of the script counts as 1, because it
    may contain that number. `has_factor` is True if the script multiplies or divides the loss.
    `is_for_inputs` is True if the pass computes the gradient of a leaf that is not a parameter.
    `targets` is known if an early loss is a mean that leaves out `ignore_index`: the number of
    targets in this mean, and of all targets.
    """
    node = getattr(loss, "grad_fn", None)
    if node is None:
        return UNKNOWN
    by_number, below = _quotients(node, micro_batches)
    return {
        "loss": number_of([loss]) if is_early else None,
        "divisions": by_number if by_number or not _has_factor(node) else 1,
        "has_factor": _has_factor(below),
        "is_for_inputs": _is_for_inputs(node),
        "targets": _targets(below) if is_early else None,
    }


def _quotients(node, number: int) -> tuple[int, object]:
    """Return how often in a row a result is divided by a number, at most 2, and what is divided.

    The second time counts only if it divides neither a sum, as for a mean of two losses, nor a
    product.
    """
    if not _divides_by(node, number):
        return 0, node
    inner = node.next_functions[0][0]
    if number > 1 and _divides_by(inner, number):
        divided = inner.next_functions[0][0]
        if divided is not None and divided.name() not in (SUM, PRODUCT):
            return 2, divided
    return 1, inner


def _divides_by(node, number: int) -> bool:
    if node is None or node.name() != QUOTIENT:
        return False
    return node._saved_other.tolist() == number


def _has_factor(node) -> bool:
    """Return True if the script multiplies or divides the result, or all terms of it."""
    while node is not None and node.name() in PASSED_ON:
        node = node.next_functions[0][0]
    if node is None:
        return True  # unknown
    terms = [each for each, _ in node.next_functions] if node.name() == SUM else [node]
    return all(each is None or each.name() in (QUOTIENT, PRODUCT) for each in terms)


def _targets(node) -> list | None:
    while node is not None and node.name() in PASSED_ON:
        node = node.next_functions[0][0]
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0"):
        return None
    if node._saved_reduction != MEAN or node._saved_weight is not None:
        return None
    return [int(node._saved_total_weight), node._saved_target.numel()]


def _is_for_inputs(node) -> bool:
    parameter = sys.modules["torch"].nn.Parameter
    held = {id(each) for optimizer in optimizers() for each in parameters_of(optimizer)}
    waiting, seen = [node], set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, parameter) and id(node.variable) not in held:
                return True
        waiting += [each for each, _ in node.next_functions]
    return False

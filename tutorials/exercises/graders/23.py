"""Grade exercise 23: train on two processes, and record which gradients are sent and used."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grading import Wrong, dist, grade, import_answer, prefixed, torch

from accel_demo.wording import counted

PROCESSES, BATCH = 2, 3
CASES = [(10, 4), (8, 4), (2, 4), (7, 4), (5, 4), (3, 1)]  # micro-batches, window
RIGHT = "every step uses the gradient of its window, averaged in one all-reduce"
SEND = "Why the gradients are sent in the last backward"
WAIT = "Why clipping and the optimizer have to wait"
DIVIDE = "Why each loss is divided by the number of micro-batches"
SHORT = "Why the last window needs its own factor"


@dataclass
class Record:
    """What one rank does while the answer trains.

    For each forward, `is_sync` lists whether DDP was set to all-reduce, first in the forward and
    then in its backward. `most_alive` is the largest number of forwards without their backward.
    """

    used: list[Any] = field(default_factory=list)  # the gradient used in each optimizer step
    all_reduces: list[int] = field(default_factory=list)  # the number of steps before each
    samples: list[int] = field(default_factory=list)  # in each forward
    is_sync: list[list[bool]] = field(default_factory=list)
    most_alive: int = 0


def observe(answer: Path, device) -> None:
    train = import_answer(answer).train
    for batches, window in CASES:
        with prefixed(f"with {batches} micro-batches and a window of {window}, "):
            observe_case(train, batches, window)


def observe_case(train, batches: int, window: int) -> None:
    """Train on `batches` micro-batches, and raise `Wrong` if this rank finds a mistake."""
    from torch.nn.parallel import DistributedDataParallel

    from accel_demo.anatomy.accumulation import EQUAL, compare, right_gradient

    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that the weights never change
    inputs = torch.randn(PROCESSES, batches, BATCH, 5)
    targets = torch.randn(PROCESSES, batches, BATCH, 1)
    record, rank = record_of(model, optimizer), dist.get_rank()
    train(model, optimizer, list(zip(inputs[rank], targets[rank], strict=True)), window)

    windows = -(-batches // window)
    judge_memory(record)
    judge_steps(len(record.used), batches, window)
    expected, differences, from_last = [], [], []  # `from_last`: from the last micro-batch alone
    for number in range(windows):
        end = min((number + 1) * window, batches)
        whole, last = (
            right_gradient(
                model.module,
                (inputs[:, start:end].flatten(0, 2), targets[:, start:end].flatten(0, 2)),
                torch.device("cpu"),
            )
            for start in (number * window, end - 1)
        )
        expected.append(whole)
        by_rank = [torch.empty_like(expected[0]) for _ in range(PROCESSES)]
        dist.all_gather(by_rank, record.used[number])
        differences.append(compare(torch.stack(by_rank), whole))
        from_last.append(compare(torch.stack(by_rank), last))
    is_added = windows > 1 and all(
        (gradient - sum(expected[: number + 1])).abs().max() <= 1e-6
        for number, gradient in enumerate(record.used)
    )
    is_last = window > 1 and all(
        result == EQUAL or (result[0] == "×" and result != "×0") for result in from_last
    )
    judge_gradients(differences, is_added, is_last, batches, window)
    judge_sharing(record, windows)


def record_of(model, optimizer) -> Record:
    """Return a record that hooks of the DDP model and of the optimizer fill in."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    record, alive = Record(), 0

    def share(group, bucket):
        record.all_reduces.append(len(record.used))
        return allreduce_hook(group, bucket)

    def after_forward(module, arguments, output) -> None:
        nonlocal alive
        if not output.requires_grad:
            return
        record.samples.append(len(output))
        record.is_sync.append([model.require_backward_grad_sync])
        number, alive = len(record.samples) - 1, alive + 1
        record.most_alive = max(record.most_alive, alive)
        output.register_hook(lambda _: at_backward(number))

    def at_backward(number: int) -> None:
        nonlocal alive
        alive -= 1
        record.is_sync[number].append(model.require_backward_grad_sync)

    def at_step(*_) -> None:
        weights = list(model.parameters())
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        record.used.append(torch.cat([gradient.flatten() for gradient in gradients]))

    model.register_comm_hook(None, share)
    model.module.register_forward_hook(after_forward)
    optimizer.register_step_pre_hook(at_step)
    return record


def judge_memory(record: Record) -> None:
    largest = max(record.samples, default=0)
    if largest > BATCH:
        raise Wrong(
            f"one forward processes {largest} samples at once, but only one micro-batch of {BATCH} "
            "samples fits into memory",
            read="Predict",
        )
    if record.most_alive > 1:
        raise Wrong(
            f"{record.most_alive} forwards run before the first backward, so the activations of "
            f"{record.most_alive} micro-batches are in memory at once: there is room for only one",
            read="Predict",
        )


def judge_steps(steps: int, batches: int, window: int) -> None:
    windows = -(-batches // window)
    if steps > windows:
        raise Wrong(
            f"the optimizer steps too often: {counted(steps, 'time')} instead of "
            f"{counted(windows, 'time')}",
            read=SHORT if steps == windows + 1 else WAIT,
        )
    if steps == windows - 1 and batches % window:
        raise Wrong(
            "there is no optimizer step for the last window, which is short: it needs one too",
            read=SHORT,
        )
    if steps < windows:
        raise Wrong(
            f"the optimizer steps {counted(steps, 'time')} instead of {counted(windows, 'time')}",
            read="Predict",
        )


def judge_gradients(
    differences: list[str], is_added: bool, is_last: bool, batches: int, window: int
) -> None:
    """Raise `Wrong` if `accumulation.compare` has found a difference in a window's gradient.

    `is_added` is True if each step used the sum of the gradients of all windows so far, and
    `is_last` if it used a multiple of the gradient of its last micro-batch.
    """
    from accel_demo.anatomy.accumulation import EQUAL

    if set(differences) == {EQUAL}:
        return
    if is_added:
        raise Wrong(
            "the gradients of the previous window are still there: call zero_grad", read=WAIT
        )
    if any("nan" in difference for difference in differences):
        raise Wrong("the gradient is nan: is a loss divided by 0?", read=SHORT)
    if "different on each rank" in differences:
        raise Wrong(
            "each rank uses its own gradient: the gradients of the whole window must be "
            "all-reduced before the step",
            read=SEND,
        )
    if set(differences) == {"×0"}:
        raise Wrong(
            "all gradients are zero when the optimizer steps: they were reset too early", read=WAIT
        )
    if is_last:
        raise Wrong(
            "each step uses only the gradient of the last micro-batch: the gradients of the "
            "earlier micro-batches were deleted",
            read=WAIT,
        )
    length = batches % window or window  # of the last window
    full, short = set(differences[:-1]), differences[-1]
    if full <= {f"×{window}"} and short in (f"×{length}", f"×{window}"):
        raise Wrong(
            f"the gradient is {window if full else length} times too large: divide each loss by "
            "the number of micro-batches in its window",
            read=DIVIDE,
        )
    if full <= {EQUAL} and length < window:
        raise Wrong(
            f"the gradient of the short window has the wrong scale ({short}): the window has only "
            f"{length} of {window} micro-batches",
            read=SHORT,
        )
    raise Wrong(f"the gradients do not match their windows: {', '.join(differences)}", read=DIVIDE)


def judge_sharing(record: Record, windows: int) -> None:
    """Check that DDP all-reduces once per step."""
    times = [record.all_reduces.count(step) for step in range(windows)]
    if times == [1] * windows and len(record.all_reduces) == windows:
        return
    numbers = ", ".join(map(str, times))
    message = f"DDP should all-reduce once per optimizer step, but the counts are {numbers}"
    if [True, False] in record.is_sync:
        message += ": no_sync surrounds a backward, but not its forward"
    elif max(times) > 1 and all(all(syncs) for syncs in record.is_sync):
        message += ": every micro-batch sends its gradients"
    raise Wrong(message, read=SEND)


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(PROCESSES,)))

"""Grade exercise 23: train on two processes, and record which gradients are sent and used.

python tutorials/exercises/graders/23.py FILE
"""

import sys
from pathlib import Path

from accel_demo.lab.grading import Wrong, grade, import_answer

PROCESSES, BATCHES, WINDOW, BATCH = 2, 10, 4, 3
WINDOWS = 3  # the last has two micro-batches
RIGHT = "every step uses the gradient of its window, averaged in one all-reduce"


def observe(answer: Path, device) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from accel_demo.anatomy.accumulation import compare, right_gradient

    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that the weights never change
    inputs = torch.randn(PROCESSES, BATCHES, BATCH, 5)
    targets = torch.randn(PROCESSES, BATCHES, BATCH, 1)
    all_reduces, used = [], []  # the step of each all-reduce; the gradient used in each step

    def share(group, bucket):
        all_reduces.append(len(used))
        return allreduce_hook(group, bucket)

    def record(*_):
        weights = list(model.parameters())
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        used.append(torch.cat([gradient.flatten() for gradient in gradients]))

    model.register_comm_hook(None, share)
    optimizer.register_step_pre_hook(record)
    rank = dist.get_rank()
    batches = list(zip(inputs[rank], targets[rank], strict=True))
    import_answer(answer).train(model, optimizer, batches, WINDOW)

    judge_steps(len(used))
    expected, differences = [], []
    for number in range(WINDOWS):
        window = slice(number * WINDOW, (number + 1) * WINDOW)
        samples = inputs[:, window].flatten(0, 2), targets[:, window].flatten(0, 2)
        expected.append(right_gradient(model.module, samples, torch.device("cpu")))
        by_rank = [torch.empty_like(used[number]) for _ in range(PROCESSES)]
        dist.all_gather(by_rank, used[number])
        differences.append(compare(torch.stack(by_rank), expected[number]))
    is_added = torch.allclose(used[1], expected[0] + expected[1], rtol=0, atol=1e-6)
    judge_gradients(differences, is_added)
    judge_sharing(all_reduces)


def judge_steps(steps: int) -> None:
    if steps > WINDOWS:
        raise Wrong(
            f"the optimizer steps too often: {steps} times for {BATCHES} micro-batches and a "
            f"window of {WINDOW}, instead of {WINDOWS} times"
        )
    if steps == WINDOWS - 1:
        raise Wrong("the last window, which is short, never reaches the optimizer: it needs a step")
    if steps < WINDOWS:
        raise Wrong(f"the optimizer steps {steps} times, instead of {WINDOWS} times")


def judge_gradients(differences: list[str], is_added: bool) -> None:
    """Raise `Wrong` if `accumulation.compare` has found a difference in a window's gradient.

    `is_added` is True if the second step used the sum of the first two windows' gradients.
    """
    from accel_demo.anatomy.accumulation import EQUAL

    *full, short = differences
    if "different on each rank" in differences:
        raise Wrong(
            "each rank uses a gradient of its own: the last backward of a window must all-reduce, "
            "so it must not be under no_sync"
        )
    if is_added:
        raise Wrong("the gradients of the previous window are still there: call zero_grad")
    if set(full) == {f"×{WINDOW}"}:
        raise Wrong(
            f"the gradient is {WINDOW} times too large: divide each loss by the window's length"
        )
    if set(full) == {EQUAL} and short != EQUAL:
        raise Wrong(
            f"the short window is wrongly scaled ({short}): divide by the number of micro-batches "
            "that it contains"
        )
    if set(full) != {EQUAL}:
        raise Wrong(f"the gradients do not match their windows: {', '.join(differences)}")


def judge_sharing(all_reduces: list[int]) -> None:
    """Check that each step has one all-reduce. `all_reduces` lists the steps of the all-reduces."""
    times = [all_reduces.count(step) for step in range(WINDOWS)]
    if times != [1] * WINDOWS or len(all_reduces) != WINDOWS:
        raise Wrong(
            "gradients must be all-reduced once per optimizer step, but the numbers of all-reduces "
            f"are {', '.join(map(str, times))}: run forward and backward of every micro-batch but "
            "the last inside no_sync"
        )


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(PROCESSES,)))

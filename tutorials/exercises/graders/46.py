"""Grade exercise 46: compare the weights after each step with those of Accelerate's LocalSGD."""

import copy
import hashlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from grading import (
    Wrong,
    dist,
    flatten,
    grade,
    import_answer,
    is_in_answer,
    list_ranks,
    naming_errors,
    torch,
)

SIZES = (1, 2, 3)
# Batches, local steps, optimizer. After one step of SGD, but not of AdamW, averaged weights are the
# same as weights with averaged gradients, so AdamW comes first.
CASES = [
    (10, 4, partial(torch.optim.AdamW, lr=0.01)),
    (6, 3, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (5, 8, partial(torch.optim.SGD, lr=0.2)),
]
RIGHT = (
    "on 1, 2 and 3 processes, the weights have the bits of Accelerate's LocalSGD after each step"
)
CLOSE = 1e-6


def observe(answer: Path, device) -> Iterator[dict]:
    """Train with the answer and with Accelerate. Yield what the weights are after each step."""
    from accelerate import local_sgd

    train, rank = import_answer(answer).train, dist.get_rank()
    for batches, every, make_optimizer in CASES:
        torch.manual_seed(46 + rank)
        model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        model = model.to(device)
        data = [
            (torch.randn(6, 20, device=device), torch.randint(4, (6,), device=device))
            for _ in range(batches)
        ]
        own_start, own = flatten(model.parameters()), copy.deepcopy(model)
        local, right = reference(copy.deepcopy(model), make_optimizer, data, every)
        wrapper, accelerate_class = torch.nn.parallel.DistributedDataParallel, local_sgd.LocalSGD
        with_states = Recorder(own)
        with forbidden(wrapper), forbidden(accelerate_class), naming_errors("train raises"):
            train(own, make_optimizer(own.parameters()), data, every)
        states = with_states.end()
        if len(states) != batches + 1:
            raise Wrong(f"the model was called {len(states) - 1} times for {batches} batches")
        averaged = averaged_gradients(right[0], model, make_optimizer, data[0])
        for step, weights in enumerate(states):
            yield {
                "case": f"with {batches} batches and every = {every}, ",
                "step": step,
                "is_last": step == batches,
                "is_due": step % every == 0 or step == batches,
                "is": describe(weights, right[step], local[step], step, averaged, own_start),
                "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            }


class Recorder:
    """Record the weights of a model before each forward, and at the end."""

    def __init__(self, model):
        self.model, self.states = model, []
        self.hook = model.register_forward_pre_hook(lambda *_: self.record())

    def record(self) -> None:
        self.states.append(flatten(self.model.parameters()).clone())

    def end(self) -> list:
        self.record()
        self.hook.remove()
        return self.states


def reference(model, make_optimizer, data: list, every: int) -> tuple[list, list]:
    """Train with Accelerate. Return the weights after each step, before and after averaging."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=data[0][0].device.type == "cpu")
    if accelerator.num_processes != dist.get_world_size():
        raise RuntimeError(f"Accelerate connected {accelerator.num_processes} processes")
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    right = [flatten(model.parameters())]
    local = [right[0]]
    with LocalSGD(accelerator, model, every) as local_sgd:
        for inputs, labels in data:
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            local.append(flatten(model.parameters()))
            local_sgd.step()
            right.append(flatten(model.parameters()))
    right[-1] = flatten(model.parameters())
    return local, right


def averaged_gradients(start, model, make_optimizer, batch: tuple):
    """Return the weights after a first step with the mean of all ranks' gradients."""
    model = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(start.clone().to(batch[0].device), model.parameters())
    optimizer = make_optimizer(model.parameters())
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return flatten(model.parameters())


def describe(weights, right, local, step: int, averaged, own_start) -> str:
    """Return in one word what the weights are. Most words exist only with several ranks."""
    total = local.to(torch.float64)
    mean = total.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()

    def close(expected) -> bool:
        return weights.shape == expected.shape and bool((weights - expected).abs().max() <= CLOSE)

    if torch.equal(weights, right):
        return "right"
    if close(right):
        return "rounded"
    if step == 0 and torch.equal(weights, own_start):
        return "own start"
    if torch.equal(weights, local):
        return "local"
    if step == 1 and close(averaged):
        return "averaged gradients"
    if close(mean):
        return "mean"
    if close(mean * dist.get_world_size()):
        return "sum"
    return "other"


class forbidden:
    """Raise `Wrong` if the learner's file creates an object of a class."""

    def __init__(self, owner: type):
        self.owner, self.original = owner, owner.__init__

    def __enter__(self) -> None:
        def refuse(*arguments, **options):
            if is_in_answer(sys._getframe(1)):
                raise Wrong(f"write it without {self.owner.__name__}")
            return self.original(*arguments, **options)

        self.owner.__init__ = refuse

    def __exit__(self, *_) -> None:
        self.owner.__init__ = self.original


def judge(number: int, seen: list[dict]) -> None:
    first, kinds = seen[0], [each["is"] for each in seen]
    if set(kinds) == {"right"}:
        return
    case, step = first["case"], first["step"]
    wrong = [rank for rank, kind in enumerate(kinds) if kind != "right"]
    right = [rank for rank, kind in enumerate(kinds) if kind == "right"]
    who, kind = list_ranks(wrong), kinds[wrong[0]]
    has = "has" if len(wrong) == 1 else "have"
    if step == 0:
        if kind == "own start":
            raise Wrong(f"{case}{who} {has} other weights at the start than rank 0")
        raise Wrong(f"{case}the weights have changed before the first step")
    after = f"{case}after {'the last step' if first['is_last'] else f'step {step}'}, "
    if kind == "averaged gradients":
        raise Wrong(f"{after}the weights are those of averaged gradients: each rank uses its own")
    if kind == "rounded":
        raise Wrong(f"{after}the weights are equal up to rounding, but not to the last bit")
    if first["is_due"]:
        if kind == "sum":
            raise Wrong(f"{after}{who} {has} the sum of the weights instead of their mean")
        if kind == "local" and right:
            raise Wrong(
                f"{after}{list_ranks(right)} has the mean, but {who} still {has} local weights"
            )
        if kind == "local":
            raise Wrong(f"{after}the ranks still have local weights: an average is missing")
    if kind in ("mean", "sum") and not first["is_due"]:
        raise Wrong(f"{after}the weights are averaged, although no average is due")
    raise Wrong(f"{after}the weights of {who} differ from those of Accelerate's LocalSGD")


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=SIZES, judge=judge))

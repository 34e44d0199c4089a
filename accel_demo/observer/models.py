"""Observe models: when DistributedDataParallel wraps and runs them, and which there are."""

import functools
import gc
import sys

from .events import emit, guarded, line_of_script
from .loaders import fingerprints
from .processes import wrap
from .weights import BEGINNING, Numbers, number_of, sums, total

replicas = Numbers()  # the models wrapped in DistributedDataParallel
_averages = Numbers()  # averages of weights (EMA, SWA)
_forwards: list = []
MOST_FORWARDS = 1000  # between two backward passes
MOST_UPDATES = 50  # of an average, that are compared


def observe_torch(torch) -> None:
    if torch.distributed.is_available():
        replica = torch.nn.parallel.DistributedDataParallel
        wrap("_pre_forward", _forward, replica)
        observe_construction(replica, _wrapped)
        wrap("__enter__", _joined, torch.distributed.algorithms.join.Join)
    _observe_after(torch.optim.swa_utils.AveragedModel, "update_parameters", _averaged)


def observe_construction(owner, after) -> None:
    _observe_after(owner, "__init__", after)


def _observe_after(owner, name: str, after) -> None:
    """Call `after` with the object after each call of one of its methods."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def observed(self, *args, **kwargs):
        original(self, *args, **kwargs)
        after(self)

    setattr(owner, name, observed)


@guarded
def _wrapped(replica) -> None:
    parameters = list(replica.parameters())
    emit(
        "wrapped",
        replica=replicas.of(replica),
        total=total(sums(parameters)),
        ranks=replica.process_group.size(),
        bytes=sum(each.numel() * each.element_size() for each in parameters if each.requires_grad),
        line=line_of_script(4),
    )


@guarded
def _averaged(average) -> None:
    """Record an update of averaged weights, so that the ranks' averages can be compared."""
    update = int(average.n_averaged)
    if update <= MOST_UPDATES:
        emit(
            "average",
            average=_averages.of(average),
            update=update,
            weights=total(sums(average.module.parameters(), BEGINNING)),
            buffers=number_of(average.module.buffers()),
            line=line_of_script(4),
        )


@guarded
def _joined(join) -> None:
    emit("join", line=line_of_script(4))


@guarded
def _forward(replica, *inputs) -> None:
    torch = sys.modules["torch"]
    if torch.is_grad_enabled() and len(_forwards) < MOST_FORWARDS:
        is_averaged = bool(replica.require_backward_grad_sync)
        _forwards.append([replicas.of(replica), is_averaged, fingerprints(inputs)])


def take_forwards() -> list[list]:
    """Return the forward passes with gradients since the last call.

    Each is a list: number of the replica, whether its gradients are averaged, and its samples.
    """
    forwards = list(_forwards)
    _forwards.clear()
    return forwards


def has_hooks() -> bool:
    """Return True if the script averages gradients with a hook of its own, or one of PyTorch's."""
    return any(getattr(replica, "_comm_hooks", None) for replica in replicas.objects())


def buffers() -> int | None:
    """Return a number of the first buffers of the wrapped models, or None if they have none."""
    return number_of(each for replica in replicas.objects() for each in replica.buffers())


def snapshot(holders: dict[int, int]) -> list[dict]:
    """Return all models of this process, found among Python's objects.

    `holders` maps the IDs of parameters to the numbers of the optimizers that hold them.
    """
    torch = sys.modules["torch"]
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.nn.Module)}
    modules = [each for each in objects if type(each) in kinds]
    parts = {id(part) for module in modules for part in module.children()}
    return [
        _description(module, holders)
        for module in modules
        if id(module) not in parts and any(True for _ in module.parameters())
    ]


def _description(module, holders: dict[int, int]) -> dict:
    norms = sys.modules["torch"].nn.modules.batchnorm
    return {
        "class": type(module).__name__,
        "inner": type(getattr(module, "module", None)).__name__,
        "replica": replicas.known(module),
        "parameters": [
            [name, holders.get(id(each)), each.requires_grad, each.grad is not None]
            for name, each in module.named_parameters()
        ],
        "batch_norms": sorted(
            {
                type(each).__name__
                for each in module.modules()
                if isinstance(each, norms._BatchNorm)
                and type(each).forward is norms._BatchNorm.forward  # not one of all ranks' samples
                and each.training
            }
        ),
    }

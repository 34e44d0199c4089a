"""Observe models: when DistributedDataParallel wraps and runs them, and which there are."""

import functools
import gc
import sys

from .events import emit, guarded, line_of_script
from .loaders import fingerprints
from .processes import wrap
from .weights import Numbers, number_of, sums, total

replicas = Numbers()  # the models wrapped in DistributedDataParallel
_forwards: list = []
MOST_FORWARDS = 1000  # between two backward passes


def observe_torch(torch) -> None:
    if torch.distributed.is_available():
        replica = torch.nn.parallel.DistributedDataParallel
        wrap("_pre_forward", _forward, replica)
        observe_construction(replica, _wrapped)
        wrap("__enter__", _joined, torch.distributed.algorithms.join.Join)


def observe_construction(owner, after) -> None:
    original = owner.__init__

    @functools.wraps(original)
    def construct(self, *args, **kwargs):
        original(self, *args, **kwargs)
        after(self)

    owner.__init__ = construct


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
                and not isinstance(each, norms.SyncBatchNorm)
                and each.training
            }
        ),
    }

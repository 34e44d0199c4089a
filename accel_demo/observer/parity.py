"""Record numbers of each optimizer step, so that two runs of a script can be compared.

All runs begin with the same seed, and shuffle in the same order: Accelerate draws another one in
several processes than in one. Dropout is switched off, because its masks depend on the number of
processes, and a run in one process multiplies the batch sizes.
"""

import functools
import os
import random
import sys

from . import memory, processes, training
from .events import emit, guarded
from .windows import optimizers, window_of

FACTOR = "ACCEL_DEMO_PARITY"  # environment variable: the factor for the batch sizes of the loaders
SEED = 1234
MOST_VALUES = 64  # of each tensor
_losses: list[float] = []  # of the backward passes since the last step
_names: dict[int, str] = {}  # ID of a parameter -> its name
_autocasts: list[bool] = []  # not empty if the script has used a lower precision
_making = [0]  # loaders that are being made: their batch samplers have the right size already


def observe_torch(torch) -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    factor = float(os.environ[FACTOR])
    if factor != 1:
        _scale_batches(torch.utils.data, factor)
    torch.nn.functional.dropout = _without_dropout
    torch.utils.data.RandomSampler.__iter__ = _shuffled
    processes.wrap("__enter__", _autocast, torch.amp.autocast_mode.autocast)
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def observed_backward(*args, **kwargs):
        _note_loss(*args)
        return backward(*args, **kwargs)

    torch.autograd.backward = observed_backward
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    register_optimizer_step_pre_hook(lambda optimizer, *_: _before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: _after_step(optimizer))


@guarded
def _autocast(context, *_) -> None:
    if getattr(context, "_enabled", False) and not _autocasts:
        _autocasts.append(True)


def _shuffled(sampler):
    """Return the indices of a `RandomSampler`, in an order that depends only on the pass."""
    torch = sys.modules["torch"]
    sampler.passes = getattr(sampler, "passes", -1) + 1
    generator = torch.Generator().manual_seed(SEED + sampler.passes)
    length = len(sampler.data_source)
    if sampler.replacement:
        indices = torch.randint(length, (sampler.num_samples,), generator=generator)
        return iter(indices.tolist())
    order = torch.cat(
        [
            torch.randperm(length, generator=generator)
            for _ in range(-(-sampler.num_samples // length))
        ]
    )
    return iter(order[: sampler.num_samples].tolist())


def _without_dropout(input, p=0.5, training=True, inplace=False):
    return input


def _scale_batches(data, factor: float) -> None:
    """Multiply the batch size of each loader, and of each batch sampler that the script makes."""
    make_loader, make_sampler = data.DataLoader.__init__, data.BatchSampler.__init__

    def scaled(size):
        return size if size is None else max(1, round(size * factor))

    @functools.wraps(make_loader)
    def loader_init(self, dataset, batch_size=1, *args, **kwargs):
        _making[0] += 1
        try:
            is_of_script = not type(self).__module__.startswith("accelerate.")
            if is_of_script and kwargs.get("batch_sampler") is None and _making[0] == 1:
                batch_size = scaled(batch_size)
            make_loader(self, dataset, batch_size, *args, **kwargs)
        finally:
            _making[0] -= 1

    @functools.wraps(make_sampler)
    def sampler_init(self, sampler, batch_size, *args, **kwargs):
        size = batch_size if _making[0] else scaled(batch_size)
        make_sampler(self, sampler, size, *args, **kwargs)

    data.DataLoader.__init__, data.BatchSampler.__init__ = loader_init, sampler_init


@guarded
def _note_loss(loss=None, *_) -> None:
    if loss is not None and hasattr(loss, "numel") and loss.numel() == 1:
        _losses.append(float(loss.detach()))


@guarded
def _before_step(optimizer) -> None:
    if len(training.stepping()) > 1:  # an optimizer in an optimizer
        return
    parameters = memory.parameters_of([optimizer])
    if not _names:
        _name_parameters()
    emit(
        "gradients",
        optimizer=window_of(optimizer).number,
        step=window_of(optimizer).steps,
        losses=list(_losses),
        names=[_names.get(id(each), f"parameter {n}") for n, each in enumerate(parameters)],
        gradients=[_summary(each.grad) for each in parameters],
        weights=[_summary(each) for each in parameters],
        low_precision=bool(_autocasts),
        settings=[training.settings_of(group) for group in optimizer.param_groups],
    )
    _losses.clear()


@guarded
def _after_step(optimizer) -> None:
    if training.stepping():
        return
    parameters = memory.parameters_of([optimizer])
    buffers = [
        (name, buffer)
        for model in memory.models_of(parameters)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    ]
    emit(
        "updated",
        optimizer=window_of(optimizer).number,
        weights=[_summary(each) for each in parameters],
        buffer_names=[_short(name) for name, _ in buffers],
        buffers=[_summary(buffer) for _, buffer in buffers],
    )


def _name_parameters() -> None:
    for model in memory.models_of(memory.parameters_of(optimizers())):
        for name, parameter in model.named_parameters():
            _names[id(parameter)] = _short(name)


def _short(name: str) -> str:
    """Return the name without the prefixes of wrappers."""
    return name.replace("module.", "").replace("_orig_mod.", "")


def _summary(tensor) -> list | None:
    """Return the norm of a tensor and a few of its values, spread over all of it, or None."""
    if tensor is None:
        return None
    torch = sys.modules["torch"]
    with torch.no_grad():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        flat = whole.detach().reshape(-1).to("cpu", torch.float64)
        if not flat.numel():
            return None
        places = torch.linspace(0, flat.numel() - 1, min(MOST_VALUES, flat.numel())).long()
        return [float(flat.norm()), flat.numel(), flat[places].tolist()]

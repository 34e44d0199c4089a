"""Record numbers of each optimizer step, so that two runs of a script can be compared.

All runs begin with the same seed, and shuffle in the same order: Accelerate draws another one in
several processes than in one, and `DistributedSampler` another one than a loader that shuffles.
Each sample is loaded with a seed of its own, for augmentation. Dropout is switched off, because its
masks depend on the number of processes, and a run in one process multiplies the batch sizes.
"""

import functools
import os
import random
import sys
import zlib

from . import memory, processes, training
from .events import emit, guarded
from .windows import optimizers, parameters_of, window_of

FACTOR = "ACCEL_DEMO_PARITY"  # environment variable: the factor for the batch sizes of the loaders
ORDER = "ACCEL_DEMO_PARITY_ORDER"  # environment variable: the seed of a `DistributedSampler`
SEED = 1234
DROPOUTS = ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"]
DROPOUTS += ["feature_alpha_dropout"]
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
    _switch_dropout_off(torch)
    torch.utils.data.RandomSampler.__iter__ = _shuffled
    processes.wrap("__iter__", _note_order, torch.utils.data.DistributedSampler)
    torch.utils.data._utils.fetch._MapDatasetFetcher.fetch = _fetched
    processes.wrap("__enter__", _autocast, torch.amp.autocast_mode.autocast)
    processes.wrap("backward", _note_loss, torch.autograd)
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
    seed = int(os.environ.get(ORDER, SEED)) + sampler.passes
    generator = torch.Generator().manual_seed(seed)
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


@guarded
def _note_order(sampler) -> None:
    if sampler.shuffle:
        emit("order", seed=sampler.seed)


def _fetched(fetcher, indices):
    """Return a batch of a dataset, as `_MapDatasetFetcher.fetch` does, with a seed per sample."""
    if not fetcher.auto_collation:
        return fetcher.collate_fn(fetcher.dataset[indices])
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    samples = []
    for index in indices:
        seed = zlib.crc32(repr(index).encode())
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy:
            numpy.random.seed(seed)
        samples.append(fetcher.dataset[index])
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if numpy:
        numpy.random.set_state(states[2])
    return fetcher.collate_fn(samples)


def _switch_dropout_off(torch) -> None:
    functional = torch.nn.functional
    for name in DROPOUTS:
        setattr(functional, name, _without_dropout)
    torch.dropout = _without_dropout
    attend = functional.scaled_dot_product_attention

    @functools.wraps(attend)
    def attend_to_all(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = attend_to_all
    for kind in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU):
        processes.wrap("forward", _without_dropout_of_layers, kind)


def _without_dropout(input, *_, **__):
    return input


def _without_dropout_of_layers(module, *_) -> None:
    module.dropout = 0.0


def _scale_batches(data, factor: float) -> None:
    """Multiply the batch size of each loader, and of each batch sampler that the script makes."""
    make_loader, make_sampler = data.DataLoader.__init__, data.BatchSampler.__init__

    def scaled(size):
        if size is None:
            return None
        emit("scaled", size=size)
        return max(1, round(size * factor))

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
    parameters = parameters_of(optimizer)
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
        low_precision=bool(_autocasts) or any(each.element_size() < 4 for each in parameters),
        settings=[training.settings_of(group) for group in optimizer.param_groups],
    )
    _losses.clear()


@guarded
def _after_step(optimizer) -> None:
    if training.stepping():
        return
    parameters = parameters_of(optimizer)
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
    for model in memory.models_of([p for each in optimizers() for p in parameters_of(each)]):
        for name, parameter in model.named_parameters():
            _names[id(parameter)] = _short(name)


def _short(name: str) -> str:
    """Return the name without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


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

"""Observe which samples each data loader returns, and end each pass after a few batches.

A pass is one iteration over a loader: an epoch, or an evaluation.
"""

import functools
import itertools
import sys
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Mapping

from . import limits
from .divisions import divided_by, padding_of, samplers_of
from .events import emit, guarded, is_in_generator, line_of_script, mute
from .processes import wrap

MOST_VALUES = 10_000  # tensors and containers in a batch
MOST_COUNTED = 100_000  # batches of a loader without a length
MOST_BATCHES = 400  # read at one line; the samples of further ones are not recorded
_loaders: list = []  # of _ObservedLoader
_makers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # iterator -> weak loader
_passes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # iterator -> _ObservedPass
_recorded: Counter = Counter()  # by the line
_latest: list[int | None] = [None]  # the number of the loader that has returned the latest batch


class _ObservedLoader:
    """A loader, or all loaders that the script creates for the same purpose, one per epoch."""

    def __init__(self, loader, key: tuple, number: int):
        self.loader, self.key, self.number, self.passes = weakref.ref(loader), key, number, 0
        self.trains = False  # a backward pass has followed one of its batches


class _ObservedPass:
    def __init__(self):
        self.loader: int | None = None
        self.number = self.batches = 0
        self.line: list | None = None
        self.length: int | None = None  # batches of the whole pass
        self.indices: deque = deque()  # of the batches that were requested, but not returned
        self.worker: int | None = None  # the loader worker that has read the latest batch


def observe_torch(torch) -> None:
    module = torch.utils.data.dataloader
    loader, iterator = module.DataLoader, module._BaseDataLoaderIter
    wrap("__init__", _made, iterator)
    begin, reset = loader.__iter__, iterator._reset
    next_index, next_batch = iterator._next_index, iterator.__next__

    @functools.wraps(begin)
    def observed_begin(self):
        result = begin(self)
        _begun(self, result)
        return result

    @functools.wraps(reset)
    def observed_reset(self, *args, **kwargs):
        _passes.pop(self, None)
        return reset(self, *args, **kwargs)

    @functools.wraps(next_index)
    def observed_index(self):
        indices = next_index(self)
        _requested(self, indices)
        return indices

    @functools.wraps(next_batch)
    def observed_batch(self):
        state = _passes.get(self)
        if state is not None and limits.pass_is_over(state.batches, state.length):
            _ended(self, shortened=True)
            raise StopIteration
        try:
            batch = next_batch(self)
        except StopIteration:
            _ended(self, shortened=False)
            raise
        _returned(self, batch)
        return batch

    wrap("_process_data", _received, module._MultiProcessingDataLoaderIter)
    loader.__iter__, iterator._reset = observed_begin, observed_reset
    iterator._next_index, iterator.__next__ = observed_index, observed_batch
    limits.shorten(loader)
    mute_workers(torch)


def mute_workers(torch, also=lambda: None) -> None:
    """Write no events in processes that load data, and do not train. Call `also` in them."""
    worker = torch.utils.data._utils.worker
    work = worker._worker_loop

    @functools.wraps(work)
    def quiet_work(*args, **kwargs):
        also()
        mute()
        return work(*args, **kwargs)

    worker._worker_loop = quiet_work


def observe_accelerate(module) -> None:
    """Observe the part of each batch that a rank gets if Accelerate reads on rank 0 only."""
    begin = module.DataLoaderDispatcher.__iter__

    @functools.wraps(begin)
    def observed_begin(self):
        for batch in begin(self):
            _given(self, batch)
            yield batch

    if limits.records_all_samples():
        module.DataLoaderDispatcher.__iter__ = observed_begin


@guarded
def _given(dispatcher, batch) -> None:
    number = number_of(dispatcher)
    own = next(own for own in _loaders if own.number == number)
    _latest[0] = number
    emit("given", loader=number, number=own.passes - 1, samples=fingerprints(batch))


@guarded
def _made(iterator, loader=None, *_) -> None:
    if loader is not None:
        _makers[iterator] = weakref.ref(loader)


def _state_of(iterator) -> _ObservedPass:
    if iterator not in _passes:
        _passes[iterator] = _ObservedPass()
    return _passes[iterator]


@guarded
def _begun(loader, iterator) -> None:
    state = _state_of(iterator)
    state.line = line_of_script(3)
    state.length = limits.real_length(loader)
    own = _entry_of(loader, (str(state.line), _length(loader.dataset), loader.batch_size))
    if own.trains:
        limits.end_run_after_epochs(own.passes)
    state.loader, state.number = own.number, own.passes
    own.passes += 1
    sampler = samplers_of(loader)[-1]
    emit(
        "pass",
        in_generator=is_in_generator(),
        loader=state.loader,
        number=state.number,
        line=state.line,
        length=state.length,
        samples=_length(loader.dataset),
        identity=_identity(loader.dataset),
        sampler=type(sampler).__name__,
        replacement=bool(getattr(sampler, "replacement", False)),
        shuffle=getattr(sampler, "shuffle", "Random" in type(sampler).__name__),
        batch_size=loader.batch_size,
        divided_by=divided_by(loader),
        shard=getattr(loader.dataset, "_accel_demo_number", None),
        **padding_of(loader, sampler),
        seed_of_workers=getattr(iterator, "_base_seed", None) if loader.num_workers else None,
    )


def mark_training() -> None:
    """Remember that a backward pass has followed the latest batch."""
    for own in _loaders:
        own.trains |= own.number == _latest[0]


def number_of(loader) -> int | None:
    """Return the number of a loader, or of the one that Accelerate has wrapped, or None."""
    if loader is None:  # what the weak reference to a deleted loader returns, too
        return None
    inner = getattr(loader, "base_dataloader", loader)
    return next((own.number for own in _loaders if own.loader() is inner), None)


def _entry_of(loader, key: tuple) -> _ObservedLoader:
    for own in _loaders:
        if own.loader() is loader:
            return own
    for own in _loaders:
        if own.loader() is None and own.key == key:  # the loader of an earlier epoch
            own.loader = weakref.ref(loader)
            return own
    _loaders.append(_ObservedLoader(loader, key, len(_loaders)))
    return _loaders[-1]


def _identity(dataset) -> int | None:
    """Return a number that is equal for datasets with equal data, or None if it is unknown.

    It is computed from the first values of the dataset's attributes, without reading a sample.
    """
    if (fingerprint := getattr(dataset, "_fingerprint", None)) is not None:  # of Hugging Face
        return zlib.crc32(str(fingerprint).encode())
    attributes = getattr(dataset, "__dict__", {"itself": dataset})  # a list has none
    parts = [(name, _data_in(value)) for name, value in sorted(attributes.items())]
    if not any(is_data for _, (_, is_data) in parts):
        return None
    return zlib.crc32(repr(parts).encode())


def _data_in(value) -> tuple:
    """Return the beginning of a value, and whether it is data, not only a setting."""
    if hasattr(value, "__getitems__") or hasattr(value, "dataset"):  # a dataset in a dataset
        identity = _identity(value)
        return identity, identity is not None
    if hasattr(value, "shape") and hasattr(value, "reshape"):  # a tensor or an array
        return (tuple(value.shape), value.reshape(-1)[:100].tolist()), len(value.reshape(-1)) > 1
    if isinstance(value, (list, tuple)):
        parts = [_data_in(each) for each in value[:100]]
        return (len(value), parts), len(value) > 1 or any(is_data for _, is_data in parts)
    if isinstance(value, range):  # indices of a Subset
        return repr(value), True
    if isinstance(value, (int, float, str, bytes, bool)):
        return value, False
    return type(value).__name__, False


def _length(dataset) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


@guarded
def _requested(iterator, indices) -> None:
    _state_of(iterator).indices.append(indices)


@guarded
def _received(iterator, batch, worker) -> None:
    _state_of(iterator).worker = worker


@guarded
def _returned(iterator, batch) -> None:
    state = _state_of(iterator)
    if state.loader is None:  # a class such as StatefulDataLoader has its own __iter__
        _begun(_makers[iterator](), iterator)
    state.batches += 1
    indices = state.indices.popleft() if state.indices else None
    details = {}
    _latest[0] = state.loader
    if _recorded[str(state.line)] < MOST_BATCHES or limits.records_all_samples():
        _recorded[str(state.line)] += 1
        details = {"indices": _as_list(indices), "samples": fingerprints(batch)}
        details |= {} if state.worker is None else {"worker": state.worker}
    emit("batch", loader=state.loader, number=state.number, **details)


def _as_list(indices) -> list | None:
    if isinstance(indices, (list, tuple)) and all(hasattr(each, "__index__") for each in indices):
        return [each.__index__() for each in indices]
    return None  # a stream, or keys that are no integers


@guarded
def _ended(iterator, shortened: bool) -> None:
    if (state := _passes.pop(iterator, None)) is not None:
        emit(
            "pass end",
            loader=state.loader,
            number=state.number,
            batches=state.batches,
            whole=_whole_length(iterator, state) if shortened else state.batches,
        )


def _whole_length(iterator, state: _ObservedPass) -> int | None:
    """Return the number of batches of a shortened pass, or None for a stream of unknown length.

    Counts the sampler's remaining batches, which the script would have read, without their data.
    """
    is_stream = (
        iterator._dataset_kind == sys.modules["torch.utils.data.dataloader"]._DatasetKind.Iterable
    )
    if state.length is not None or is_stream:
        return state.length
    remaining = sum(1 for _ in itertools.islice(iterator._sampler_iter, MOST_COUNTED))
    if remaining == MOST_COUNTED:
        return None
    return state.batches + len(state.indices) + remaining


def fingerprints(batch) -> list[list[int]]:
    """Return one list per tensor in the batch, with a checksum for each of its samples."""
    torch = sys.modules["torch"]
    found: list[list[int]] = []
    waiting: deque = deque([batch])
    for _ in range(MOST_VALUES):  # an object may contain itself
        if not waiting:
            break
        value = waiting.popleft()
        if isinstance(value, torch.Tensor) and value.dim() and value.numel():
            found.append(_checksums(torch, value))
        elif isinstance(value, (list, tuple)):
            if value and all(isinstance(each, (str, int, float)) for each in value):
                found.append([zlib.crc32(repr(each).encode()) for each in value])
            else:
                waiting += value
        elif isinstance(value, Mapping):  # for example a dict or BatchEncoding
            waiting += value.values()
        elif hasattr(value, "__dict__") and not callable(value):  # for example a dataclass
            waiting += vars(value).values()
    return found


def _checksums(torch, tensor) -> list[int]:
    rows = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    size = rows.shape[1] * rows.element_size()
    if size % 8 == 0 and size >= 4096:  # as integers of 64 bits, summed: 11 GB/s instead of 2
        return rows.view(torch.int64).sum(1).tolist()
    content = rows.view(torch.uint8).numpy()
    return [zlib.crc32(row.tobytes()) for row in content]

"""Observe what a stream yields on each rank before Accelerate keeps a part of it.

`IterableDatasetShard` reads the whole stream on each rank, and needs the same one on all of them.
"""

import copy
import functools
import json
import multiprocessing
import sys
import time
import zlib
from collections.abc import Iterator, Mapping

from .events import emit, guarded, path_of
from .processes import wrap
from .randomness import states

MOST_ELEMENTS = 256  # of a pass, per worker, that are recorded
_shards: list[int] = [0]  # how many were created: equal numbers belong together on all ranks


def observe_accelerate(module) -> None:
    """Record the elements that reach an `IterableDatasetShard` of accelerate.data_loader."""
    shard = module.IterableDatasetShard
    begin = shard.__iter__
    wrap("__init__", _made, shard)

    @functools.wraps(begin)
    def observed_begin(self):
        recording = _recording(self)  # its truth value would be its length
        return begin(self if recording is None else recording)

    shard.__iter__ = observed_begin


@guarded
def _made(shard, *_) -> None:
    shard._accel_demo_number = _shards[0]  # travels to the workers with the stream
    _shards[0] += 1


@functools.partial(guarded, also_if_muted=True)  # loader workers are muted
def _recording(shard):
    """Return a copy that records what its stream yields. The copy has the same attributes."""
    result = copy.copy(shard)
    result.dataset = _Recorded(shard.dataset, getattr(shard, "_accel_demo_number", None))
    return result


class _Recorded:
    """A stream that records its first elements, and behaves like the original otherwise."""

    def __init__(self, stream, number: int | None):
        self._stream, self._number = stream, number

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator:
        checksums, is_random = [], False
        elements = iter(self._stream)
        try:
            while len(checksums) < MOST_ELEMENTS:
                before = _states_now()
                try:
                    element = next(elements)
                except StopIteration:
                    return
                is_random |= before is None or before != _states_now()
                checksums.append(_checksum_of(element))
                yield element
            yield from elements
        finally:
            _read(self._number, checksums, is_random)


@functools.partial(guarded, also_if_muted=True)
def _states_now() -> dict[str, tuple] | None:
    return states()


@functools.partial(guarded, also_if_muted=True)
def _read(number: int | None, checksums: list[int | None], is_random: bool) -> None:
    worker = sys.modules["torch"].utils.data.get_worker_info()
    event = {"shard": number, "elements": checksums, "is_random": is_random}
    parent = multiprocessing.parent_process()
    if worker is None:
        emit("stream", worker=0, **event)
    elif parent is not None:
        line = json.dumps({"kind": "stream", "time": time.time(), "worker": worker.id, **event})
        with open(path_of("workers", parent.pid), "a", encoding="utf-8") as file:
            file.write(line + "\n")


@functools.partial(guarded, also_if_muted=True)
def _checksum_of(element) -> int | None:
    """Return a checksum of an element of a stream, or None if its content is unknown."""
    try:
        return zlib.crc32(repr(_content(element)).encode())
    except TypeError:
        return None


def _content(value):
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if hasattr(value, "tobytes"):  # an array
        return zlib.crc32(value.tobytes())
    if isinstance(value, Mapping):
        return [(str(name), _content(each)) for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_content(each) for each in value]
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return value
    raise TypeError(f"the content of {type(value).__name__} is unknown")

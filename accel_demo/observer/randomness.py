"""Observe which random numbers are drawn, by the states of the random number generators.

Only states are read: nothing here draws a number or changes a state. The generators are torch's on
the CPU, Python's and NumPy's global one. All three are Mersenne Twisters: a state is a block of
624 numbers and the position in it. https://en.wikipedia.org/wiki/Mersenne_Twister
"""

import ctypes
import functools
import json
import multiprocessing
import random
import sys
import time
import zlib

from .events import emit, guarded, line_of_script, path_of
from .processes import wrap

MOST_FORWARDS, MOST_FETCHES = 20, 40  # per process, that are observed
BLOCK = 624  # numbers of 32 bits
_seen = {"forwards": 0, "fetches": 0}
_forward: dict = {"before": None, "line": None}  # torch's state, and the line of the forward pass


def observe_torch(torch) -> None:
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    fetcher = torch.utils.data._utils.fetch._MapDatasetFetcher
    next_batch, fetch = iterator.__next__, fetcher.fetch

    @functools.wraps(next_batch)
    def observed_batch(self):
        batch = next_batch(self)
        _batch_returned()
        return batch

    @functools.wraps(fetch)
    def observed_fetch(self, indices):
        before = _fetch_begins()
        batch = fetch(self, indices)
        if before is not None:
            _fetched(before, indices)
        return batch

    iterator.__next__, fetcher.fetch = observed_batch, observed_fetch
    wrap("backward", lambda *_: _backward_begins(), torch.autograd)
    if torch.distributed.is_available():
        replica = torch.nn.parallel.DistributedDataParallel
        wrap("_pre_forward", lambda *_: _forward_begins(), replica)


@guarded
def _batch_returned() -> None:
    if _seen["forwards"] < MOST_FORWARDS:
        _forward.update(before=_state_of_torch(), line=None)


@guarded
def _forward_begins() -> None:
    if _seen["forwards"] < MOST_FORWARDS:
        _forward["line"] = line_of_script(4)
        if _forward["before"] is None:  # no batch since the last backward pass
            _forward["before"] = _state_of_torch()


@guarded
def _backward_begins() -> None:
    """Record what was drawn since the batch was read, or else since the forward pass began."""
    before, _forward["before"] = _forward["before"], None
    if before is not None:
        _seen["forwards"] += 1
        draws = _draws({"torch": before}, {"torch": _state_of_torch()})
        emit("draws", where="forward", draws=draws, line=_forward["line"] or line_of_script(4))


@functools.partial(guarded, also_if_muted=True)  # loader workers are muted
def _fetch_begins() -> dict[str, tuple] | None:
    """Return the states of all generators, or None after the first few batches."""
    _seen["fetches"] += 1
    return states() if _seen["fetches"] <= MOST_FETCHES else None


@functools.partial(guarded, also_if_muted=True)
def _fetched(before: dict[str, tuple], indices) -> None:
    """Record what the data set and `collate_fn` have drawn for a batch."""
    draws = _draws(before, states())
    if not draws:
        return
    samples = len(indices) if isinstance(indices, (list, tuple)) else 1
    worker = sys.modules["torch"].utils.data.get_worker_info()
    parent = multiprocessing.parent_process()
    if worker is None:
        emit("draws", where="data set", draws=draws, samples=samples)
    elif parent is not None:
        event = {"kind": "draws", "time": time.time(), "seed": worker.seed - worker.id}
        with open(
            path_of("workers", parent.pid), "a", encoding="utf-8"
        ) as file:  # of all workers of a process
            file.write(json.dumps(event | {"draws": draws, "samples": samples}) + "\n")


def states() -> dict[str, tuple]:
    states = {"torch": _state_of_torch(), "random": _state_of_python()}
    if (numpy := _state_of_numpy()) is not None:
        states["numpy.random"] = numpy
    return states


def _draws(before: dict[str, tuple], after: dict[str, tuple]) -> list[list]:
    """Return [name, hash of both states, numbers drawn] for each generator that has changed.

    The numbers are a lower bound: after more than one block, all but the last one are not counted.
    """
    draws = []
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            (old, begin), (new, end) = before[name], after[name]
            numbers = end - begin if old == new else BLOCK - begin + end
            draws.append([name, _hash(old, begin), _hash(new, end), numbers])
    return sorted(draws)


def _hash(block: bytes | tuple, position: int) -> int:
    """Return a number that is equal for equal states in all processes."""
    number = zlib.crc32(block) if isinstance(block, bytes) else hash(block)
    return hash((number, position))


def _state_of_torch() -> tuple[bytes, int]:
    content = sys.modules["torch"].get_rng_state().numpy().tobytes()
    unused = int.from_bytes(content[8:12], sys.byteorder)  # fields of at::mt19937_data_pod
    return content[24 : 24 + 8 * BLOCK], BLOCK + 1 - unused


def _state_of_python() -> tuple[tuple, int]:
    block = random.getstate()[1]
    return block[:-1], block[-1]


def _state_of_numpy() -> tuple[bytes, int] | None:
    """Return the state of NumPy's global generator, read from memory: `get_state` is slow."""
    get = getattr(sys.modules.get("numpy.random"), "get_bit_generator", None)
    generator = get and get()
    if generator is None or type(generator).__name__ != "MT19937":
        return None
    content = ctypes.string_at(generator.ctypes.state_address, 4 * BLOCK + 4)
    return content[:-4], int.from_bytes(content[-4:], sys.byteorder)

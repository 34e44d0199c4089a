"""Count the bytes of all tensors that exist, after each operation of PyTorch."""

import time
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside `with LiveBytes(tensors) as live`, `live.peak` is the most bytes that have existed.

    These are the bytes of `tensors`, of their gradients, and of all tensors that operations have
    returned since. Tensors that share memory are counted once. Set `live.peak` to 0 to find the
    peak of the next phase.

    Between processes, it waits a millisecond after each operation: gloo's threads may release a
    tensor a moment after the collective has returned.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.peak = 0
        self.pause = 0.001 if dist.is_initialized() else 0.0  # seconds
        self.storages = weakref.WeakKeyDictionary()  # of the tensors that exist
        for tensor in tensors:
            self.add([tensor, tensor.grad])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        time.sleep(self.pause)
        self.add(tree_leaves(result))
        self.peak = max(self.peak, self.now())
        return result

    def add(self, results: list) -> None:
        for tensor in results:
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.storages[local.untyped_storage()] = None

    def now(self) -> int:
        """Return the bytes that exist now. A storage may have been resized, as FSDP2 does."""
        sizes = {storage.data_ptr(): storage.nbytes() for storage in self.storages}
        return sum(sizes.values())

"""Import large modules faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, so that an import of torch in this block is a fifth faster.

    The collector would find nothing to free.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

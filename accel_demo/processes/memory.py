"""The memory that a process has freed."""

import ctypes
from contextlib import suppress


def keep_freed_memory() -> None:
    """Make this process reuse the memory that it frees, instead of returning it to the system.

    Each training step frees the tensors of the previous step and allocates new ones of the same
    sizes. By default, the C library returns large blocks to the system, which must clear and map
    their pages again at the next allocation. For a small model on a CPU, this takes a large part
    of each step's time. The drawback of keeping the memory is that the process never shrinks.
    Without glibc, the function has no effect.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # option numbers from malloc.h
    with suppress(AttributeError, TypeError):  # no mallopt on macOS, no CDLL(None) on Windows
        mallopt = ctypes.CDLL(None).mallopt
        # Versions of glibc before 2.35 reject values above 2**25.
        if mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 2**25):
            mallopt(m_trim_threshold, 2**30)

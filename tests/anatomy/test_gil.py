"""Threads share one interpreter lock; processes do not."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accel_demo.anatomy.gil import (
    WORK,
    WORKERS,
    cores_busy,
    has_gil,
    measure,
    preprocess,
)


def test_the_work_has_the_same_result_every_time():
    assert preprocess(3) == preprocess(3) != preprocess(4)
    for function, amount in WORK.values():
        assert function(amount // 10) == function(amount // 10)


@pytest.mark.skipif(not has_gil(), reason="needs a Python with the GIL")
@pytest.mark.parametrize("kind", WORK)
def test_two_threads_run_at_the_same_time_in_torch_but_not_in_python(kind):
    """The switch interval is 10 minutes, so threads switch only if code releases the GIL."""
    function, _ = WORK[kind]
    in_torch = kind == "matrix products in torch"
    function(1)  # warm up
    both_are_there, started = threading.Barrier(2), []

    def work() -> bool:
        """Work until both threads have started or time is up; return whether both started."""
        both_are_there.wait(timeout=60)  # the last to arrive continues; the other waits for the GIL
        started.append(1)
        ends_at = time.perf_counter() + (60 if in_torch else 0.5)  # seconds
        while function(1) and len(started) < 2 and time.perf_counter() < ends_at:
            pass
        return len(started) == 2

    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(2) as threads:
        sys.setswitchinterval(600)  # seconds
        try:
            parts = [threads.submit(work) for _ in range(2)]
            has_seen_the_other = sorted(part.result() for part in parts)
        finally:
            sys.setswitchinterval(interval)
    assert has_seen_the_other == [in_torch, True]


@pytest.mark.skipif(not has_gil(), reason="needs a Python with the GIL")
def test_two_threads_never_keep_more_than_one_core_busy_with_python():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        times = measure(repeats=1)
        assert torch.get_num_threads() == 3  # `measure` restores the number of threads
    finally:
        torch.set_num_threads(threads)
    assert set(times) == set(WORK) and all(set(kind) == set(WORKERS) for kind in times.values())
    assert cores_busy(times["preprocessing in Python"]["two threads"]) < 1.15

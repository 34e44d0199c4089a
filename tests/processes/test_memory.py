"""Test that freed memory is kept, so that later allocations cause no page faults."""

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="needs the malloc of glibc")
def test_keeping_freed_memory_avoids_page_faults():
    def page_faults(first_line: str) -> int:
        program = f"""
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: use 4-KiB pages on every machine
from accel_demo.processes.memory import keep_freed_memory
{first_line}
def allocate():
    for megabytes in (48, 32, 16):
        torch.zeros(megabytes * 2**18)
for _ in range(10):
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
        return int(subprocess.check_output([sys.executable, "-c", program], timeout=60))

    assert page_faults("keep_freed_memory()") < page_faults("") / 10

# wrong: assert_distributed(2) should raise a RuntimeError, but raises SystemExit

import sys

from accelerate import PartialState


def assert_distributed(n: int) -> None:
    if PartialState().num_processes != n:
        sys.exit(f"error: expected {n} processes")

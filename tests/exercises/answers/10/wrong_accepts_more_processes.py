# wrong: with two connected processes, assert_distributed(1) returns, although 2 processes are

from accelerate import PartialState


def assert_distributed(n: int) -> None:
    if PartialState().num_processes < n:
        raise RuntimeError(f"expected {n} processes")

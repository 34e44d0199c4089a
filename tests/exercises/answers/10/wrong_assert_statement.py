# wrong: assert_distributed(2) should raise a RuntimeError, but raises AssertionError

from accelerate import PartialState


def assert_distributed(n: int) -> None:
    assert PartialState().num_processes == n, f"expected {n} processes"

# wrong: assert_distributed(1) raises on one process only: every process should raise

from accelerate import PartialState


def assert_distributed(n: int) -> None:
    state = PartialState()
    if state.num_processes != n and state.is_main_process:
        raise RuntimeError(f"expected {n} processes")

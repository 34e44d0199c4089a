# wrong: with two clones from torchrun, assert_distributed(2) returns, although Accelerate has not

import os


def assert_distributed(n: int) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) != n:
        raise RuntimeError(f"expected {n} processes")

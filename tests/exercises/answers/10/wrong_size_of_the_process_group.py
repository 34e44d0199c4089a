# wrong: with two clones from torchrun, assert_distributed(2) returns, although Accelerate has not

import torch.distributed as dist


def assert_distributed(n: int) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != n:
        raise RuntimeError(f"expected {n} processes, got {size}")

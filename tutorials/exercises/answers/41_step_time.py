"""A model answer to exercise 41."""


def step_ms(
    forward_ms: float,
    backward_ms: float,
    optimizer_ms: float,
    buckets: list[tuple[int, float]],
    world_size: int,
    latency_us: float,
    gigabytes_per_s: float,
) -> float:
    sent = 0.0  # time at which the connection is free, in ms after the start of the step
    for size, ready in buckets:
        start = max(sent, forward_ms + ready * backward_ms)
        sent = start + all_reduce_ms(size, world_size, latency_us, gigabytes_per_s)
    return max(sent, forward_ms + backward_ms) + optimizer_ms


def all_reduce_ms(size: int, world_size: int, latency_us: float, gigabytes_per_s: float) -> float:
    """Return the time of one ring all-reduce of `size` bytes."""
    message_ms = latency_us / 1e3 + size / world_size / (gigabytes_per_s * 1e6)
    return 2 * (world_size - 1) * message_ms

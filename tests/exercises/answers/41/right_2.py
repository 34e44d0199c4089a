"""Exercise 41: predict how long a training step takes."""


def _ring_ms(size: int, world_size: int, latency_us: float, gigabytes_per_s: float) -> float:
    """Return the time of one all-reduce: a reduce-scatter and an all-gather of N - 1 steps each."""
    messages = 2 * (world_size - 1)
    sending_us = size / world_size / gigabytes_per_s / 1000  # 1 GB/s is 1,000 bytes per µs
    return messages * (latency_us + sending_us) / 1000


def step_ms(
    forward_ms: float,
    backward_ms: float,
    optimizer_ms: float,
    buckets: list[tuple[int, float]],  # (bytes, share of backward after which it is ready)
    world_size: int,
    latency_us: float,  # of one message
    gigabytes_per_s: float,  # bandwidth of the connection to the next process
) -> float:
    sent_ms = 0.0  # on a clock that starts with backward
    for size, ready in buckets:
        start_ms = max(sent_ms, ready * backward_ms)
        sent_ms = start_ms + _ring_ms(size, world_size, latency_us, gigabytes_per_s)
    return forward_ms + max(backward_ms, sent_ms) + optimizer_ms

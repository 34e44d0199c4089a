"""Exercise 41: predict how long a training step takes."""


def step_ms(
    forward_ms: float,
    backward_ms: float,
    optimizer_ms: float,
    buckets: list[tuple[int, float]],  # (bytes, share of backward after which it is ready)
    world_size: int,
    latency_us: float,  # of one message
    gigabytes_per_s: float,  # bandwidth of the connection to the next process
) -> float:
    messages = 2 * (world_size - 1)  # of each process, in one all-reduce
    backward_end = forward_ms + backward_ms
    link_free = forward_ms
    for size, ready in buckets:
        chunk_ms = latency_us / 1e3 + size / world_size / (gigabytes_per_s * 1e6)
        bucket_ready = forward_ms + ready * backward_ms
        link_free = max(link_free, bucket_ready) + messages * chunk_ms
    return max(link_free, backward_end) + optimizer_ms

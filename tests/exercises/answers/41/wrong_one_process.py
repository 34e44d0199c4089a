# wrong: With one process, nothing is sent
def step_ms(
    forward_ms, backward_ms, optimizer_ms, buckets, world_size, latency_us, gigabytes_per_s
):
    def all_reduce_ms(size):
        steps = max(2, 2 * (world_size - 1))
        return steps * (latency_us / 1e3 + size / world_size / (gigabytes_per_s * 1e6))

    free = 0
    for size, ready in buckets:
        free = max(free, forward_ms + ready * backward_ms) + all_reduce_ms(size)
    return max(free, forward_ms + backward_ms) + optimizer_ms

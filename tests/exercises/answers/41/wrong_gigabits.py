# wrong: bits and bytes seem to be mixed up
def step_ms(
    forward_ms, backward_ms, optimizer_ms, buckets, world_size, latency_us, gigabytes_per_s
):
    def all_reduce_ms(size):
        message = latency_us / 1e3 + 8 * size / world_size / (gigabytes_per_s * 1e6)
        return 2 * (world_size - 1) * message

    free = 0
    for size, ready in buckets:
        free = max(free, forward_ms + ready * backward_ms) + all_reduce_ms(size)
    return max(free, forward_ms + backward_ms) + optimizer_ms

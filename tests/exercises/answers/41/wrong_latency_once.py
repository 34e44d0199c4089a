# wrong: the latency seems to be paid too rarely
def step_ms(
    forward_ms, backward_ms, optimizer_ms, buckets, world_size, latency_us, gigabytes_per_s
):
    def all_reduce_ms(size):
        if world_size == 1:
            return 0
        sent = 2 * (world_size - 1) / world_size * size
        return latency_us / 1000 + sent / gigabytes_per_s / 1e6

    free = 0
    for size, ready in buckets:
        free = max(free, forward_ms + ready * backward_ms) + all_reduce_ms(size)
    return max(free, forward_ms + backward_ms) + optimizer_ms

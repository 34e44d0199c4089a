# wrong: the buckets do not seem to wait for each other
def step_ms(
    forward_ms, backward_ms, optimizer_ms, buckets, world_size, latency_us, gigabytes_per_s
):
    def all_reduce_ms(size):
        messages = 2 * (world_size - 1)
        return messages * (latency_us / 1000 + size / world_size / gigabytes_per_s / 1e6)

    ends = [forward_ms + ready * backward_ms + all_reduce_ms(size) for size, ready in buckets]
    return max(*ends, forward_ms + backward_ms) + optimizer_ms

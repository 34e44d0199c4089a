# wrong: the all-reduces seem to start before their buckets are ready
def step_ms(
    forward_ms, backward_ms, optimizer_ms, buckets, world_size, latency_us, gigabytes_per_s
):
    def all_reduce_ms(size):
        messages = 2 * (world_size - 1)
        return messages * (latency_us / 1000 + size / world_size / gigabytes_per_s / 1e6)

    communication = sum(all_reduce_ms(size) for size, _ in buckets)
    return forward_ms + max(backward_ms, communication) + optimizer_ms

"""Exercise 41: predict how long a training step takes.

`step_ms` returns the time of one step of DDP in ms, on N connected processes that are all equally
fast. A step consists of forward, backward and the optimizer, which run one after the other and take
`forward_ms`, `backward_ms` and `optimizer_ms`.

`buckets` is a list of pairs (bytes, ready), at least one, in the order in which DDP sends them. A
bucket is ready when the share `ready` of backward is done: 0.25 means after a quarter of it, and 1
at its end. `ready` never decreases from one bucket to the next. DDP sends each bucket with one
all-reduce, which may start as soon as the bucket is ready and the all-reduce before it has ended.
Sending does not slow down computing. The optimizer starts when backward and all all-reduces have
ended.

Each all-reduce is a chunked ring with `world_size` processes. It cuts the bucket into equal chunks
(do not round their size). In each of the ring's steps, every process sends one message, and this
takes `latency_us` + bytes / `gigabytes_per_s`. It receives at the same time, which costs nothing
more. Adding up the chunks takes no time, and nothing is sent if there is only one process. 1 GB is
10⁹ bytes, 1 ms is 1,000 µs.

The function is called with these argument names, for nine hidden cases. The result may differ by
0.1% from the right one.

accel-demo check 41
"""


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

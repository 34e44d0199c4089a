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

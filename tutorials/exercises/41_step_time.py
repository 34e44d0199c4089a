"""Exercise 41: predict how long a training step takes.

`step_ms` returns how long one DDP step takes, in ms, on N connected processes, all equally fast.
Forward, backward and the optimizer run one after the other and take `forward_ms`, `backward_ms` and
`optimizer_ms`.

`buckets` is a list of at least one pair (bytes, ready), in the order in which DDP sends them. A
bucket is ready when the share `ready` of backward is done: 0.25 means after a quarter of it, and 1
means at its end. `ready` never decreases from one bucket to the next. DDP sends each bucket with
one all-reduce, which starts as soon as the bucket is ready and the previous all-reduce has ended.
Sending doesn't slow down computing. The optimizer starts when backward and all the all-reduces have
ended.

Each all-reduce is a chunked ring with `world_size` processes, which cuts the bucket into equal
chunks (don't round their size). In each step of the ring, every process sends one message, and that
takes `latency_us` + bytes / `gigabytes_per_s`. It receives a message at the same time, at no extra
cost. Adding up the chunks takes no time, and a single process sends nothing. 1 GB is 10⁹ bytes, and
1 ms is 1,000 µs.

The check calls the function with these argument names for nine hidden cases. Your result may be off
by 0.1%.

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
    raise NotImplementedError

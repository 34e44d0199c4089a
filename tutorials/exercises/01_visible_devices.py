"""Exercise 01: find the physical GPU behind each `cuda:N`.

Write what CUDA does with CUDA_VISIBLE_DEVICES. The function gets the value of the variable, and the
UUIDs of the machine's GPUs, starting with GPU 0. It returns the number of the GPU behind each
`cuda:N`:

    visible_devices("0,4", uuids) == {"cuda:0": 0, "cuda:1": 4}

The rules are the same as on page 01:

- If the variable is not set, `value` is None, and all GPUs are visible. If it is empty, none is.
- Numbers are separated by commas, and blanks may surround them. Their order is kept.
- An id that matches no GPU (-1, 8 on a machine with eight GPUs, a word) hides itself and everything
  after it.
- If an id occurs twice, no GPU is visible.
- A UUID starts with "GPU-" and may be shortened. It must be the beginning of exactly one GPU's
  UUID.
- If the first id is a number, all ids must be numbers. If it is a UUID, all must be UUIDs. An id of
  the wrong kind matches no GPU. No blanks may surround a UUID.
- A value that starts with "MIG-" names a part of a GPU. It is passed on: {"cuda:0": value}.

accel-demo check 01
"""


def visible_devices(value, uuids):
    return {f"cuda:{number}": number for number in range(len(uuids))}

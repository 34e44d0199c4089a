"""Exercise 90: find the physical GPU behind each `cuda:N`.

Write a function that interprets CUDA_VISIBLE_DEVICES as CUDA does. Its arguments are the value of
the variable and the UUIDs of the machine's GPUs, starting with GPU 0. It returns the number of the
GPU behind each `cuda:N`:

    visible_devices("0,4", uuids) == {"cuda:0": 0, "cuda:1": 4}

The rules are the same as on page 90:

- If the variable is not set, `value` is None, and all GPUs are visible. If it is empty, no GPU is
  visible.
- Numbers are separated by commas. Spaces around a number are ignored. The order is kept.
- An id that matches no GPU hides all ids after it. Examples are -1, a word, and 8 on a machine with
  eight GPUs.
- If an id occurs twice, no GPU is visible.
- A UUID starts with "GPU-". Its first characters are enough if they match exactly one GPU.
- If the first id is a number, all ids must be numbers. If it is a UUID, all must be UUIDs. An id of
  the other kind matches no GPU. A UUID with spaces around it matches no GPU.
- A value that starts with "MIG-" names a part of a GPU. Return it unchanged: {"cuda:0": value}.

accel-demo check 90
"""


def visible_devices(value, uuids):
    return {f"cuda:{number}": number for number in range(len(uuids))}

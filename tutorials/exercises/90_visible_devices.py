"""Exercise 90: find the physical GPU behind each `cuda:N`.

Write a function that interprets CUDA_VISIBLE_DEVICES the way CUDA does. `value` is the value of the
variable: a string, or None if the variable is not set. `uuids` is a list of strings, the UUIDs of
the machine's 1 to 8 GPUs, starting with GPU 0. Return a dict that maps each `cuda:N` to the number
of its GPU (an int), for all visible GPUs:

    visible_devices("0,4", uuids) == {"cuda:0": 0, "cuda:1": 4}

The check tests these rules from page 90, with values chosen for each rule and with random values:

- If the variable is not set, all GPUs are visible. If it is empty, no GPU is.
- Ids are separated by commas. The visible GPUs keep the order of the list and are counted from 0.
- An id is a number such as 4 or a UUID such as GPU-4f6ec3d2-…. The beginning of a UUID, including
  the prefix `GPU-`, is also an id if it matches exactly one GPU.
- An id that doesn't match exactly one GPU is invalid, and hides itself and all ids after it.
  Examples are -1, 8 on a machine with eight GPUs, and a beginning that two UUIDs share.

The check doesn't test repeated ids, numbers mixed with UUIDs, spaces, empty ids, words, or parts of
GPUs (MIG).

accel-demo check 90
"""


def visible_devices(value: str | None, uuids: list[str]) -> dict[str, int]:
    return {f"cuda:{number}": number for number in range(len(uuids))}

"""Exercise 90: find the physical GPU behind each `cuda:N`.

Write a function that interprets CUDA_VISIBLE_DEVICES as CUDA does. `value` is the value of the
variable, a string, or None if the variable is not set. `uuids` is a list of strings, the UUIDs of
the machine's 1 to 8 GPUs, starting with GPU 0. Return a dict with the number of the GPU (an int)
behind each `cuda:N`, for all visible GPUs:

    visible_devices("0,4", uuids) == {"cuda:0": 0, "cuda:1": 4}

These rules of page 90 are checked, with values for each rule and with random values:

- If the variable is not set, all GPUs are visible. If it is empty, no GPU is visible.
- Ids are separated by commas. The visible GPUs keep the order of the list, and are counted from 0.
- An id is a number such as 4, or a UUID such as GPU-4f6ec3d2-…. The beginning of a UUID is also an
  id, if it matches exactly one GPU. Such a beginning includes the prefix `GPU-`.
- An id that does not match exactly one GPU is invalid. It hides itself and all ids after it.
  Examples are -1, 8 on a machine with eight GPUs, and a beginning that two UUIDs share.

These cases are not checked: a repeated id, numbers mixed with UUIDs, spaces, empty ids, words, and
parts of GPUs (MIG).

accel-demo check 90
"""


def visible_devices(value: str | None, uuids: list[str]) -> dict[str, int]:
    return {f"cuda:{number}": number for number in range(len(uuids))}

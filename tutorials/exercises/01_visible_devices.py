"""Exercise 01: which physical GPU is each `cuda:N`?

Write what CUDA does with CUDA_VISIBLE_DEVICES. The function gets the value of the variable, and the
UUIDs of the machine's GPUs, with GPU 0 first. It gives the number of the GPU behind each `cuda:N`:

    visible_devices("0,4", uuids) == {"cuda:0": 0, "cuda:1": 4}

The rules, as on page 01:

- `value` is None where the variable is not set: then all GPUs are visible. Empty: none is.
- Numbers come between commas, perhaps with blanks around them. The order written counts.
- An id that no GPU has (-1, 8 on a machine with eight, a word) hides itself and all that follow.
- An id that comes twice leaves no GPU at all.
- A UUID starts with "GPU-" and may be cut. It has to be the beginning of one GPU's UUID alone.
- The first id decides whether the others have to be numbers or UUIDs. One of the other kind is no
  id. There are no blanks around a UUID.
- A value that starts with "MIG-" names a part of a GPU. It is passed on: {"cuda:0": value}.

accel-demo check 01
"""


def visible_devices(value, uuids):
    return {f"cuda:{number}": number for number in range(len(uuids))}

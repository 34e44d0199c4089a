"""Exercise 10: stop a program when the wrong number of processes is connected.

Write `assert_distributed(n)`, which takes an int. A training script calls it once in each of its
processes, right after creating its `Accelerator`. The function returns if Accelerate has connected
exactly `n` processes, and the launcher has not started more than these. Otherwise it raises a
`RuntimeError` in every process. Two clones must not pass `assert_distributed(1)`: although each of
them is "process 0 of 1", they were started together.

Your function is called with n = 1, 2 and 3 in five launches: `python` alone, two clones from
torchrun, a config that starts only one process, two connected processes, and `debug_launcher` (not
on macOS).

accel-demo check 10
"""


def assert_distributed(n: int) -> None:
    raise NotImplementedError("write assert_distributed in this file")

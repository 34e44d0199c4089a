"""Exercise 00: stop a program that is less distributed than its author thinks.

Write `assert_distributed(n)`. A training script calls it once, directly after it has created its
`Accelerator`. If Accelerate has connected exactly `n` processes, it returns and prints nothing.
Otherwise it raises a `RuntimeError`.

A launcher's environment variables prove nothing: they are only what the launcher intended. What
would you use instead? Look at the output of the program of page 00 for the two clones: which values
are still 2, and which are 1?

accel-demo check 00
"""


def assert_distributed(n: int) -> None:
    raise NotImplementedError("write assert_distributed in this file")

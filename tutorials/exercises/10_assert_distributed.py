"""Exercise 10: stop a program that has the wrong number of connected processes.

Write `assert_distributed(n)`. A training script calls it once, directly after it has created its
`Accelerator`. If Accelerate has connected exactly `n` processes, the function prints nothing and
returns. Otherwise it raises a `RuntimeError`.

The environment variables of a launcher prove nothing: they only show what the launcher intended.
What can you use instead? Look at the output of the two clones on page 10: which values are 2, and
which are 1?

accel-demo check 10
"""


def assert_distributed(n: int) -> None:
    raise NotImplementedError("write assert_distributed in this file")

"""Exercise 00: stop a program that is not as distributed as its author thinks.

Write `assert_distributed(n)`. A training script calls it once, right after it has built its
`Accelerator`. It must raise a `RuntimeError` unless Accelerate has connected exactly `n` processes:
then it returns, and says nothing.

A launcher only promises, so its environment variables are no proof. Whom would you ask instead?
Look at what the program of page 00 prints for the two clones: who there still says 2, and who 1?

accel-demo check 00
"""


def assert_distributed(n: int) -> None:
    raise NotImplementedError("write assert_distributed in this file")

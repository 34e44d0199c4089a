"""Exercise 45: decide how often a run saves.

`save_every` returns the number of steps from one checkpoint to the next, an integer of at least 1.
`record` describes earlier runs on the same kind of GPU, each with (number of GPUs, hours that it
ran, number of its interruptions). Assume that the interruptions are as frequent per GPU and hour in
the next run, which uses `gpus` of them. A step takes `step_seconds` there, and a save takes
`save_seconds`, during which no step is made. After an interruption, the run starts again in
`restart_seconds`, from its newest checkpoint.

If no earlier run was ever interrupted, assume one interruption in all of them together.

The check calls the function for six hidden runs. It simulates each of them for years, with random
interruptions, and accepts your number of steps if the time lost is at most 2% more than with the
best number.

accel-demo check 45
"""


def save_every(
    record: list[tuple[int, float, int]],
    gpus: int,
    step_seconds: float,
    save_seconds: float,
    restart_seconds: float,
) -> int:
    raise NotImplementedError

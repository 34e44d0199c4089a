"""Grade exercise 41: predict the step times of nine cases, and recognize typical mistakes."""

import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import isclose
from pathlib import Path

from grading import Wrong, grade, import_answer, naming_errors

TOLERANCE = 1e-3  # relative


@dataclass(frozen=True)
class Case:
    """The arguments of `step_ms`."""

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    buckets: list[tuple[int, float]]
    world_size: int
    latency_us: float
    gigabytes_per_s: float

    @property
    def computed(self) -> float:
        """Time at which backward ends, in ms."""
        return self.forward_ms + self.backward_ms


def make_cases() -> dict[str, Case]:
    """Return the hidden cases, the simplest first."""
    draw = random.Random(41)

    def make(buckets: int, megabytes: float, *connection) -> Case:
        times = [round(draw.uniform(*span), 1) for span in ((15, 25), (35, 50), (4, 8))]
        sizes = [round(1e6 * megabytes * draw.uniform(0.6, 1.4)) for _ in range(buckets)]
        shares = sorted(round(draw.uniform(0.1, 0.9), 3) for _ in range(buckets - 1))
        return Case(*times, list(zip(sizes, [*shares, 1.0], strict=True)), *connection)

    early = make(3, 4, 3, 30, 12)
    early = replace(early, buckets=[(size, share / 2) for size, share in early.buckets])
    return {
        "one process": make(4, 25, 1, 50, 1.25),
        "one bucket and two processes": make(1, 60, 2, 80, 2.5),
        "one bucket and eight processes": make(1, 60, 8, 80, 2.5),
        "64 processes and small buckets": make(4, 0.05, 64, 250, 12.5),
        "large buckets and a slow connection": make(4, 27, 4, 50, 1.25),
        "all-reduces that finish before backward does": early,
        "pauses between the all-reduces": make(5, 8, 6, 40, 6),
        "six large buckets": make(6, 25, 3, 100, 5),
        "eight buckets and five processes": make(8, 6, 5, 300, 3),
    }


CASES = make_cases()
RIGHT = f"the step times are correct in all {len(CASES)} cases, from one process to 64"


@dataclass(frozen=True)
class Ring:
    """A method of calculating the time of an all-reduce, and its mistake, if it has one.

    `messages` and `share` depend on the number of processes. `share` is the number of bytes that
    each process sends, relative to the bucket.
    """

    mistake: str = ""
    messages: Callable[[int], float] = lambda n: 2 * (n - 1)
    share: Callable[[int], float] = lambda n: 2 * (n - 1) / n
    ms_per_us: float = 1e-3
    bytes_per_ms: float = 1e6  # at 1 GB/s

    def ms(self, size: int, case: Case) -> float:
        if case.world_size == 1:
            return 0.0
        latency = self.messages(case.world_size) * case.latency_us * self.ms_per_us
        sent = self.share(case.world_size) * size
        return latency + sent / (case.gigabytes_per_s * self.bytes_per_ms)


@dataclass(frozen=True)
class Schedule:
    """A method of calculating the time of a step from its all-reduces, and its mistake."""

    mistake: str
    step_ms: Callable[[Case, list[float]], float]


def chain(case: Case, sends: list[float], *, origin=None, unit=None, waits=True) -> float:
    """Return the time at which the last all-reduce ends. The options introduce mistakes."""
    origin = case.forward_ms if origin is None else origin
    unit = case.backward_ms if unit is None else unit
    end = 0.0
    for (_, share), ms in zip(case.buckets, sends, strict=True):
        ready = origin + share * unit
        end = max(end, ready) + ms if waits else max(end, ready + ms)
    return end


def right_step(case: Case, sends: list[float], **options) -> float:
    return max(case.computed, chain(case, sends, **options)) + case.optimizer_ms


UNIT = (
    "the bandwidth seems to be converted incorrectly: 1 GB/s is 10⁹ bytes per second, and the "
    "result is in ms"
)
BITS = "bits and bytes seem to be mixed up: the bandwidth is in bytes per second"
WHOLE = "each process seems to send the whole bucket, but it sends chunks of it in each half"
HALF = "only one half of the ring seems to be counted: the reduce-scatter or the all-gather"
LATENCY = "the latency seems to be paid too rarely: every step of the ring sends a message"
STEPS = "each half seems to take N steps: count them in the table of steps on page 21"
RECEIVED = (
    "received messages seem to be counted too, but a process sends and receives at the same time"
)
RINGS = [
    Ring(),
    Ring("the latency seems to be missing, or much too small (it is in µs)", messages=lambda n: 0),
    Ring(LATENCY, messages=lambda n: 1),
    Ring(LATENCY, messages=lambda n: 2),
    Ring(LATENCY, messages=lambda n: n - 1),
    Ring(LATENCY, messages=lambda n: n),
    Ring(STEPS, messages=lambda n: 2 * n),
    Ring(STEPS, lambda n: 2 * n, lambda n: 2),
    Ring(WHOLE, lambda n: 1, lambda n: 1),
    Ring(WHOLE, lambda n: 2, lambda n: 2),
    Ring(WHOLE, share=lambda n: 1),
    Ring("each message seems to be a whole bucket, but it is a chunk", share=lambda n: 2 * (n - 1)),
    Ring("each process seems to send N chunks in each half: count them", share=lambda n: 2),
    Ring("each process seems to send only one chunk in total", lambda n: 1, lambda n: 1 / n),
    Ring("all messages together seem to have one chunk's bytes", share=lambda n: 1 / n),
    Ring("each half seems to consist of one message", lambda n: 2, lambda n: 2 / n),
    Ring("all messages of a half together seem to have one chunk's bytes", share=lambda n: 2 / n),
    Ring(HALF, lambda n: n - 1, lambda n: (n - 1) / n),
    Ring(HALF, share=lambda n: (n - 1) / n),
    Ring(RECEIVED, share=lambda n: 4 * (n - 1) / n),
    Ring(RECEIVED, lambda n: 4 * (n - 1), lambda n: 4 * (n - 1) / n),
    Ring(UNIT, bytes_per_ms=1024**3 / 1e3),
    Ring(UNIT, bytes_per_ms=1e3),
    Ring(UNIT, bytes_per_ms=1e9),
    Ring(BITS, bytes_per_ms=1e6 / 8),
    Ring(BITS, bytes_per_ms=8e6),
    Ring("the latency seems to be much too large: it is in µs, and the result in ms", ms_per_us=1),
]
READY = "the buckets seem to be ready at the wrong times: `ready` is a share of backward alone"
MAXIMUM = (
    "the all-reduces seem to start before their buckets are ready: what is the second number of "
    "each bucket?"
)
SAME_TIME = "the buckets do not seem to wait for each other, but only one is sent at a time"
OPTIMIZER = "the optimizer seems to start too early: it also waits for the last all-reduce"
SCHEDULES = [
    Schedule("", right_step),
    Schedule(
        "nothing seems to overlap: a bucket can be sent before backward ends",
        lambda case, sends: case.computed + sum(sends) + case.optimizer_ms,
    ),
    Schedule(
        MAXIMUM,
        lambda case, sends: case.forward_ms + max(case.backward_ms, sum(sends)) + case.optimizer_ms,
    ),
    Schedule(MAXIMUM, lambda case, sends: max(case.computed, sum(sends)) + case.optimizer_ms),
    Schedule(MAXIMUM, lambda case, sends: max(case.computed + case.optimizer_ms, sum(sends))),
    Schedule(SAME_TIME, lambda case, sends: right_step(case, sends, waits=False)),
    Schedule(
        SAME_TIME,
        lambda case, sends: (
            max(case.computed, case.forward_ms + case.buckets[-1][1] * case.backward_ms + sends[-1])
            + case.optimizer_ms
        ),
    ),
    Schedule(
        "the all-reduces seem to follow each other without a pause, but the next bucket may not be "
        "ready yet",
        lambda case, sends: (
            max(case.computed, case.forward_ms + case.buckets[0][1] * case.backward_ms + sum(sends))
            + case.optimizer_ms
        ),
    ),
    Schedule(READY, lambda case, sends: right_step(case, sends, origin=0.0)),
    Schedule(READY, lambda case, sends: right_step(case, sends, origin=0.0, unit=case.computed)),
    Schedule(READY, lambda case, sends: right_step(case, sends, unit=case.computed)),
    Schedule(
        OPTIMIZER, lambda case, sends: max(case.computed + case.optimizer_ms, chain(case, sends))
    ),
    Schedule(
        "the optimizer seems to start when the last all-reduce ends, even if backward is still "
        "running",
        lambda case, sends: chain(case, sends) + case.optimizer_ms,
    ),
    Schedule(
        "the optimizer's time seems to be missing",
        lambda case, sends: right_step(case, sends) - case.optimizer_ms,
    ),
    Schedule(
        "the time of forward seems to be missing",
        lambda case, sends: right_step(case, sends) - case.forward_ms,
    ),
    Schedule(
        "the result seems to be in seconds, but it should be in ms",
        lambda case, sends: right_step(case, sends) / 1000,
    ),
]


def observe(answer: Path) -> None:
    step_ms = import_answer(answer).step_ms
    predicted = {name: call(step_ms, name, case) for name, case in CASES.items()}
    expected = predictions(RINGS[0], SCHEDULES[0])
    wrong = [name for name in CASES if not is_close(predicted[name], expected[name])]
    if wrong:
        name = (
            wrong[0] if wrong == ["one process"] else next(n for n in wrong if n != "one process")
        )
        raise Wrong(
            f"{name}: step_ms returns {predicted[name]:.5g}, but the step takes "
            f"{expected[name]:.5g} ms{explanation(predicted, wrong)}.\nThe arguments: "
            f"{', '.join(f'{key}={value}' for key, value in asdict(CASES[name]).items())}"
        )


def call(step_ms: Callable, name: str, case: Case) -> float:
    with naming_errors(f"{name}: step_ms raises"):
        result = step_ms(**asdict(case))
    try:
        return float(result)
    except (TypeError, ValueError):
        raise Wrong(f"{name}: step_ms must return a number, got {result!r:.60}") from None


def predictions(ring: Ring, schedule: Schedule) -> dict[str, float]:
    return {
        name: schedule.step_ms(case, [ring.ms(size, case) for size, _ in case.buckets])
        for name, case in CASES.items()
    }


def is_close(result: float, expected: float) -> bool:
    return isclose(result, expected, rel_tol=TOLERANCE)


def explanation(predicted: dict[str, float], wrong: list[str]) -> str:
    """Return the typical mistake that explains all predictions, or "" if none does."""
    if wrong == ["one process"]:
        return ". With one process, nothing is sent"
    # Try the pairs with a single mistake first.
    pairs = sorted(product(RINGS, SCHEDULES), key=lambda pair: sum(bool(x.mistake) for x in pair))
    for ring, schedule in pairs:
        guess = predictions(ring, schedule)
        if all(is_close(predicted[name], guess[name]) for name in CASES if name != "one process"):
            return f". In all cases with several processes, {ring.mistake or schedule.mistake}"
    return ""


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, time_limit=20))

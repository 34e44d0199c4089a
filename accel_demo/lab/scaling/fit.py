"""How much of a training does not get faster with more processes: two laws, and their fit."""

import statistics
from collections.abc import Callable

from accel_demo.lab.measurements import median_interval


def amdahl(serial_share: float, processes: float) -> float:
    """The speed-up of the same work on more processes, where a share of it stays serial.

    Source: Amdahl, AFIPS 1967, https://doi.org/10.1145/1465482.1465560
    """
    return 1 / (serial_share + (1 - serial_share) / processes)


def gustafson(serial_share: float, processes: float) -> float:
    """The speed-up where the work grows with the processes; the share is that of the longer run.

    Source: Gustafson, Communications of the ACM, 1988, https://doi.org/10.1145/42411.42415
    """
    return processes - serial_share * (processes - 1)


def serial_share_of(law: Callable, speedups: dict[int, float]) -> float:
    """The share that comes nearest to these speed-ups {processes: times as fast as one}.

    Least squares over the process counts, in the quantity in which each law is a straight line of
    the share: the time for `amdahl`, the speed-up for `gustafson`. One process tells nothing of it.
    Above 1 the processes are slower than one, which the laws do not explain; below 0 they are
    faster than the ideal. Raises `ValueError` without a count above 1.
    """
    slopes, distances = [], []
    for processes, speedup in speedups.items():
        if law is amdahl:  # 1/speedup = 1/n + share × (1 − 1/n)
            slopes.append(1 - 1 / processes)
            distances.append(1 / speedup - 1 / processes)
        else:  # speedup = n − share × (n − 1)
            slopes.append(processes - 1)
            distances.append(processes - speedup)
    if not any(slopes):
        raise ValueError(f"only {list(speedups)} processes: the share needs more than one")
    pairs = zip(slopes, distances, strict=True)
    return sum(slope * distance for slope, distance in pairs) / sum(slope**2 for slope in slopes)


def fit(law: Callable, speedups: dict[int, list[float]]) -> dict:
    """The serial share with its error, from repeated speed-ups {processes: one per repeat}.

    Each repeat is fitted by itself: `shares`. `serial_share` is their median, and `interval` holds
    it with 90 % confidence (`median_interval`: empty below five repeats). `misfit` is how far the
    law is at most from a median speed-up, as a share of it: None with one count above 1, because
    then any speed-up fits.
    """
    repeats = len(next(iter(speedups.values())))
    shares = [
        serial_share_of(law, {processes: values[repeat] for processes, values in speedups.items()})
        for repeat in range(repeats)
    ]
    serial_share = statistics.median(shares)
    several = {processes: values for processes, values in speedups.items() if processes > 1}
    misfit = None
    if len(several) > 1:
        medians = {processes: statistics.median(values) for processes, values in several.items()}
        misfit = max(
            abs(law(serial_share, processes) / median - 1) for processes, median in medians.items()
        )
    return {
        "law": law.__name__,
        "serial_share": serial_share,
        "interval": median_interval(shares),
        "misfit": misfit,
        "shares": shares,
    }

"""Fit the serial share: the fraction of a training step that more processes do not speed up."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from accel_demo.lab.measurements import median_interval


@dataclass(frozen=True)
class SerialShareFit:
    """A scaling law, fitted to the speed-ups of one version of the training loop.

    `shares` contains the serial share of each repetition. `serial_share` is the median of `shares`,
    and `interval` is its 90 % confidence interval (empty with fewer than five repetitions).
    `misfit` is the largest relative difference between a median speed-up and the law's prediction.
    """

    scaling: str  # "strong" or "weak"
    version: str
    law: str
    serial_share: float
    interval: list[float]
    misfit: float
    shares: list[float]


def amdahl(serial_share: float, processes: float) -> float:
    """Return the speed-up for a fixed amount of work, a fraction `serial_share` of which is serial.

    Source: Amdahl, AFIPS 1967, https://doi.org/10.1145/1465482.1465560
    """
    return 1 / (serial_share + (1 - serial_share) / processes)


def gustafson(serial_share: float, processes: float) -> float:
    """Return the speed-up for an amount of work that grows with the number of processes.

    `serial_share` is the fraction of the parallel run's time that is spent on serial work.
    Source: Gustafson, Communications of the ACM, 1988, https://doi.org/10.1145/42411.42415
    """
    return processes - serial_share * (processes - 1)


LAWS: dict[str, Callable[[float, float], float]] = {"strong": amdahl, "weak": gustafson}


def serial_share_of(law: Callable, speedups: dict[int, float]) -> float:
    """Return the serial share with which `law` fits the speed-ups best.

    `speedups` maps process counts to speed-ups. We use a least-squares fit of the quantity that
    depends linearly on the share: the time in Amdahl's law, and the speed-up in Gustafson's law. A
    share above 1 means that more processes are slower than one, and a share below 0 means that they
    are faster than the ideal. The laws explain neither. Raises `ValueError` if no count is above 1.
    """
    if law is amdahl:  # 1/speedup = 1/n + share × (1 − 1/n)
        points = [(1 - 1 / n, 1 / speedup - 1 / n) for n, speedup in speedups.items()]
    else:  # speedup = n − share × (n − 1)
        points = [(n - 1, n - speedup) for n, speedup in speedups.items()]
    if max(speedups) == 1:
        raise ValueError("fitting a serial share needs more than one process")
    return sum(slope * rise for slope, rise in points) / sum(slope**2 for slope, _ in points)


def fit(scaling: str, version: str, speedups: dict[int, list[float]]) -> SerialShareFit:
    """Fit Amdahl's law to strong scaling, or Gustafson's law to weak scaling.

    `speedups` maps each process count to one speed-up per repetition.
    """
    law = LAWS[scaling]
    shares = [
        serial_share_of(law, dict(zip(speedups, repeat, strict=True)))
        for repeat in zip(*speedups.values(), strict=True)
    ]
    serial_share = statistics.median(shares)
    distances = [
        abs(law(serial_share, processes) / statistics.median(values) - 1)
        for processes, values in speedups.items()
        if processes > 1
    ]
    about = (law.__name__, serial_share, median_interval(shares), max(distances))
    return SerialShareFit(scaling, version, *about, shares)

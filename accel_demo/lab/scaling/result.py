"""The result of `accel-demo scaling`: speed-ups and serial shares."""

import statistics
from dataclasses import dataclass

from accel_demo.lab.measurements import median_interval
from accel_demo.lab.scaling.fit import LAWS, SerialShareFit, fit

PLAIN, PARALLEL = "plain PyTorch", ("raw DDP", "Accelerate")
LEAST_COUNTS = 3  # process counts that a law is fitted to


@dataclass(frozen=True)
class ScalingCase:
    """A training run to measure. `batch_size` is per process."""

    version: str
    processes: int
    batch_size: int


@dataclass(frozen=True)
class ScalingRow:
    """The speed of one case. Speed-ups are relative to plain PyTorch in the same repetition."""

    scaling: str  # "strong" or "weak"
    version: str
    processes: int
    batch_size: int  # per process
    images_per_second: list[float]
    speedups: list[float]
    median_speedup: float
    interval: list[float]  # 90 % confidence interval of the median speed-up
    efficiency: float


@dataclass(frozen=True)
class GilRow:
    """The speed of two workers, relative to running both parts of the work one after the other."""

    work: str
    workers: str
    speedups: list[float]
    median_speedup: float
    interval: list[float]  # 90 % confidence interval of the median speed-up
    cores_busy: float


@dataclass(frozen=True)
class ScalingResult:
    """Settings and measurements of one run of `accel-demo scaling`."""

    processes: list[int]
    threads: int  # per process
    device: str
    cores: int
    model: str
    batch_size: int
    steps: int
    repeats: int
    rows: list[ScalingRow]
    fits: list[SerialShareFit]
    has_gil: bool
    gil_rows: list[GilRow]
    rate: str | None = None  # the most that each process can send, such as "100mbit"
    gradient_bytes: int = 0


def scaling_cases(counts: list[int], batch_size: int) -> list[ScalingCase]:
    """Return all cases to measure. With one process, strong and weak scaling are the same case."""
    cases = [ScalingCase(PLAIN, 1, batch_size)]
    for version in PARALLEL:
        for count in counts:
            for batch in sorted({batch_size // count, batch_size}):
                cases.append(ScalingCase(version, count, batch))
    return cases


def scaling_rows(
    rates: dict[ScalingCase, list[float]], counts: list[int], batch_size: int
) -> list[ScalingRow]:
    """Return a row for each version, process count and kind of scaling. `rates` is in images/s."""
    rows = []
    for scaling in LAWS:
        for version in (PLAIN, *PARALLEL):
            for count in counts if version != PLAIN else [1]:
                batch = batch_size // count if scaling == "strong" else batch_size
                values = rates[ScalingCase(version, count, batch)]
                speedups = ratios(values, rates[ScalingCase(PLAIN, 1, batch_size)])
                median, interval = statistics.median(speedups), median_interval(speedups)
                row = (scaling, version, count, batch, values, speedups, median, interval)
                rows.append(ScalingRow(*row, efficiency=median / count))
    return rows


def fits_of(rows: list[ScalingRow]) -> list[SerialShareFit]:
    """Fit the serial shares of DDP and Accelerate, for strong and weak scaling.

    A scaling law compares a program with itself, so these speed-ups are relative to the same
    version in one process. The list is empty with fewer than three process counts: any speed-up of
    two processes fits some serial share, so one of them is no check of a law.
    """
    fits = []
    for scaling in LAWS:
        for version in PARALLEL:
            rates = {
                row.processes: row.images_per_second
                for row in rows
                if (row.scaling, row.version) == (scaling, version)
            }
            if len(rates) >= LEAST_COUNTS:
                speedups = {count: ratios(values, rates[1]) for count, values in rates.items()}
                fits.append(fit(scaling, version, speedups))
    return fits


def ratios(values: list[float], references: list[float]) -> list[float]:
    return [value / reference for value, reference in zip(values, references, strict=True)]

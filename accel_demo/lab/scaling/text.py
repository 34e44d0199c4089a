"""What `accel-demo scaling` found, as tables and sentences to print."""

import statistics

from accel_demo.show import table

SCALINGS = ("strong", "weak")


def text(found: dict) -> str:
    """The tables and what they say, to print."""
    where = "a GPU each" if found["device"] == "cuda" else f"{threads_text(found['threads'])} each"
    counts = ", ".join(map(str, found["processes"]))
    counts += " connected process" if counts == "1" else " connected processes"
    repeats = f"{found['repeats']} repeat{'s' if found['repeats'] > 1 else ''}"
    parts = [
        f"{found['model']} on {found['device']}, {where}; {counts}; medians of {repeats} in turns"
    ]
    for scaling in SCALINGS:
        of = "the global batch" if scaling == "strong" else "the batch per process"
        parts.append(f"{scaling.capitalize()} scaling: {of} is {found['batch_size']} images.")
        parts.append(scaling_table([row for row in found["rows"] if row["scaling"] == scaling]))
    if found["fits"]:
        parts += [fits_table(found["fits"]), what_the_fit_can_tell(found)]
    if shared := cores_shared(found):
        parts.append(shared)
    parts.append(gil_table(found["gil"]))
    return "\n\n".join(parts)


def scaling_table(rows: list[dict]) -> str:
    head = ["telling", "processes", "batch", "images/s", "min – max", "speed-up", "90 % interval"]
    cells = []
    for row in rows:
        rates = row["images_per_second"]
        cells.append(
            [
                row["telling"],
                row["processes"],
                f"{row['processes']} × {row['batch_size']}",
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f} – {max(rates):,.0f}",
                f"{row['speedup']:.2f}",
                interval_text(row["interval"]),
                f"{row['efficiency']:.0%}",
            ]
        )
    return table([*head, "efficiency"], cells)


def fits_table(fits: list[dict]) -> str:
    head = ["fit", "telling", "serial share", "90 % interval", "farthest from a median"]
    rows = [
        [
            f"{one['law'].capitalize()}, {one['scaling']} scaling",
            one["telling"],
            f"{one['serial_share']:.3f}",
            interval_text(one["interval"], digits=3),
            "one point: no check" if one["misfit"] is None else f"{one['misfit']:.0%}",
        ]
        for one in fits
    ]
    return table(head, rows)


def interval_text(interval: list[float], digits: int = 2) -> str:
    return " – ".join(f"{bound:.{digits}f}" for bound in interval) or "needs 5 repeats"


def what_the_fit_can_tell(found: dict) -> str:
    """In words: what so many process counts say about the law, and what they do not."""
    several = [count for count in found["processes"] if count > 1]
    said = "The serial share is relative to the same telling in one process."
    if len(several) == 1:
        said += (
            f" With 1 and {several[0]} processes there is one speed-up to fit, and each law has a "
            "share for any speed-up. So it sums up what was lost, but it cannot show that the law "
            "holds, nor promise anything for more processes."
        )
    if any(one["serial_share"] > 1 for one in found["fits"]):
        said += " Above 1: slower than one process, and no serial share explains that."
    if any(one["serial_share"] < 0 for one in found["fits"]):
        said += " Below 0: faster than the ideal, and no serial share explains that."
    if any(not 0 <= one["serial_share"] <= 1 for one in found["fits"]):
        said += " Noise can do it too: look whether the interval goes beyond 0 to 1 as a whole."
    return said


def cores_shared(found: dict) -> str:
    """In words: which counts have fewer cores than threads, or nothing. GPUs are not shared."""
    cores, threads = found["cores"], found["threads"]
    crowded = [count for count in found["processes"] if count * threads > cores]
    if found["device"] == "cuda" or not crowded:
        return ""
    counts = " and ".join(map(str, crowded)) + (" process" if crowded == [1] else " processes")
    each = f"{threads_text(threads)} each"
    return (
        f"{counts} with {each} share {cores} core{'s' if cores > 1 else ''}: the "
        "threads take turns there, so do not expect more speed from more of them."
    )


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def gil_table(found: dict) -> str:
    head = ["work, in two parts", "way", "times as fast", "cores busy"]
    rows = [
        [kind, way, f"{one['speedup']:.2f}", f"{one['cores_busy']:.2f}"]
        for kind, ways in found["work"].items()
        for way, one in ways.items()
    ]
    lock = "has the global interpreter lock" if found["has_gil"] else "has no interpreter lock"
    return f"{table(head, rows)}\n\nThis Python {lock}."

"""Format counts, lists, byte sizes, durations and ages consistently."""


def counted(number: int, noun: str) -> str:
    """Return the number and the noun: "1 process", "2 processes", "3 connected processes".

    Pass `noun` in the singular.
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}{ending}"


def listed(names: list[str], most: int = 10) -> str:
    """Join names with commas. If there are more than `most`, "…" replaces the others."""
    return ", ".join([*names[:most], *["…"] * (len(names) > most)])


def byte_size(number: float) -> str:
    """Format a number of bytes in a suitable unit: "800 B", "12 KiB", "1.5 GiB"."""
    return _in_units(number, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1})


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit: "35 µs", "1.25 ms", "3.2 s"."""
    return _in_units(seconds, {"s": 1, "ms": 1e-3, "µs": 1e-6})


def age(seconds: float) -> str:
    """Format the age of something: "5 s ago", "2 min ago", "3 h ago", "1 day ago"."""
    sizes = {"day": 86400, "h": 3600, "min": 60, "s": 1}
    unit = next((unit for unit, size in sizes.items() if seconds >= size), "s")
    number = max(0, int(seconds / sizes[unit]))
    return f"{counted(number, unit) if unit == 'day' else f'{number} {unit}'} ago"


def _in_units(number: float, units: dict[str, float]) -> str:
    """Format `number` with three significant digits in the largest unit that does not exceed it."""
    unit = next((unit for unit, size in units.items() if abs(number) >= size), [*units][-1])
    value = number / units[unit]
    return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:,.0f} {unit}"

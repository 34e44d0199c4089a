"""Spell numbers with their nouns and units in the same way everywhere."""


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 process", "2 processes", "3 connected processes".

    `noun` is in the singular.
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}{ending}"


def byte_size(number: float) -> str:
    """Return a number of bytes in the unit that suits it: "800 B", "12 KiB", "1.5 GiB"."""
    return _in_units(number, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1})


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: "35 µs", "1.25 ms", "3.2 s"."""
    return _in_units(seconds, {"s": 1, "ms": 1e-3, "µs": 1e-6})


def _in_units(number: float, units: dict[str, float]) -> str:
    """Return three digits of the number in the largest unit of which it has at least one."""
    unit = next((unit for unit, size in units.items() if abs(number) >= size), [*units][-1])
    value = number / units[unit]
    return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:,.0f} {unit}"

"""Numbers in words, spelled alike everywhere."""


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 process", "2 processes", "3 connected processes".

    `noun` is in the singular.
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"

"""The flag `--guess`: commit to a number before a command measures it."""

import argparse
import math

from accel_demo.errors import UserError


def add_guess(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add `--guess VALUE`. `meaning` says which number to guess, and its unit."""
    help = f"your guess, compared with the result: {meaning}"
    parser.add_argument("--guess", type=_number, metavar="VALUE", help=help)


def compared(guess: float, result: float) -> str:
    """Return a sentence that says how far the guess is from the result.

    A guess counts as right if it differs by less than 1% of the result.
    """
    if math.isnan(result):
        return "There is no result to compare your guess with."
    start = f"Your guess: {_shown(guess)}. The result: {_shown(result)}."
    difference = abs(guess - result)
    if difference <= 0.01 * abs(result):
        return f"{start} Your guess is right."
    share = f" ({difference / abs(result):.0%})" if result else ""
    direction = "high" if guess > result else "low"
    return f"{start} Your guess is too {direction} by {_shown(difference)}{share}."


def _shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _number(text: str) -> float:
    try:
        number = float(text.rstrip("%"))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"--guess must be a number, got {text}")
    return number

"""Compare a guess with the result: commit to a number before a command measures it."""

import math


def comparison(guess: float, result: float, unit: str = "") -> str:
    """Return a sentence that says how far the guess is from the result.

    A guess counts as right if it differs by at most 1% of the result. `unit` follows each number.
    """
    if not math.isfinite(result):
        return "There is no result to compare your guess with."
    start = f"Your guess: {_shown(guess)}{unit}. The result: {_shown(result)}{unit}."
    difference = abs(guess - result)
    if difference <= 0.01 * abs(result):
        return f"{start} Your guess is right."
    direction = "high" if guess > result else "low"
    return f"{start} Your guess is too {direction} by {_shown(difference)}{unit}."


def _shown(number: float) -> str:
    """Format a number with three significant digits, or as an integer from 1,000 on."""
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"

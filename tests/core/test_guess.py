"""Test that a guess is compared with the result."""

import math

import pytest

from accel_demo.errors import UserError
from accel_demo.guess import comparison


@pytest.mark.parametrize(
    ("guess", "result", "said"),
    [
        (2, 2, "Your guess: 2. The result: 2. Your guess is right."),
        (1.36, 1.35, "Your guess: 1.36. The result: 1.35. Your guess is right."),
        (1.9, 1.35, "The result: 1.35. Your guess is too high by 0.55."),
        (50, 63.4, "Your guess is too low by 13.4."),
        (3, 0, "The result: 0. Your guess is too high by 3."),
        (0, 0, "Your guess is right."),
        (8000, 5332, "The result: 5,332. Your guess is too high by 2,668."),
        (999.7, 5, "Your guess: 1,000. The result: 5. Your guess is too high by 995."),
        (1, math.inf, "There is no result to compare your guess with."),
        (1, math.nan, "There is no result to compare your guess with."),
    ],
)
def test_a_guess_is_compared_with_the_result(guess, result, said):
    assert comparison(guess, result).endswith(said)


def test_a_guess_of_the_speed_up_needs_two_processes():
    from accel_demo.lab.scaling.command import main

    with pytest.raises(UserError, match="^--guess is for 2 processes: include 2 in --processes$"):
        main(["--processes", "1", "--guess", "1"])


def test_a_guess_of_the_duplicates_is_compared_with_the_last_loader(start):
    result = start("accel-demo shards --quick --guess 4".split())
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(
        "\nYour guess: 4 samples. The result: 2 samples. Your guess is too high by 2 samples.\n"
    )

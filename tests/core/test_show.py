"""Test that `show.table` returns valid Markdown, and that tables fit the terminal."""

import random

import pytest

from accel_demo import show
from tests.support.pseudo_terminal import shown_on_terminal

RULES = (
    ["rule", "processes", "global batch", "peak learning rate", "weights", "over the steps"],
    [
        ["right", 2, 32, "0.01", "equal", "▁▂▃▄▅▆▇█" * 4],
        ["global batch ×N, learning rate ×√N", 2, 64, "0.014", "different", "│─┼" * 10],
    ],
)


def on_terminal(table: tuple, columns: int) -> str:
    return shown_on_terminal(lambda: print(show.table(*table)), columns).rstrip("\n")


def test_booleans_are_aligned_like_words_and_not_like_numbers():
    text = show.table(["done", "count", "mixed"], [[False, 1, 1], [True, 2.5, True]])
    assert text.splitlines() == [
        "| done  | count | mixed |",
        "| ----- | ----: | ----- |",
        "| False |     1 | 1     |",
        "| True  |   2.5 | True  |",
    ]


def test_a_vertical_bar_in_a_cell_is_escaped():
    text = show.table(["a|b", "count"], [["`0,a|b`", 1]])
    assert text.splitlines() == [
        r"| a\|b     | count |",
        "| -------- | ----: |",
        r"| `0,a\|b` |     1 |",
    ]


def test_a_table_that_is_too_wide_for_the_terminal_is_split_below_the_same_first_column():
    assert on_terminal(RULES, 72).splitlines() == [
        "| rule                     | processes | global | peak     | weights   |",
        "|                          |           |  batch | learning |           |",
        "|                          |           |        | rate     |           |",
        "| ------------------------ | --------: | -----: | -------- | --------- |",
        "| right                    |         2 |     32 | 0.01     | equal     |",
        "| global batch ×N,         |         2 |     64 | 0.014    | different |",
        "| learning rate ×√N        |           |        |          |           |",
        "",
        "| rule                              | over the steps                   |",
        "| --------------------------------- | -------------------------------- |",
        "| right                             | ▁▂▃▄▅▆▇█▁▂▃▄▅▆▇█▁▂▃▄▅▆▇█▁▂▃▄▅▆▇█ |",
        "| global batch ×N, learning rate    | │─┼│─┼│─┼│─┼│─┼│─┼│─┼│─┼│─┼│─┼   |",
        "| ×√N                               |                                  |",
    ]


@pytest.mark.parametrize("columns", [20, 30, 47, 60, 80, 100, 120])
def test_no_cell_is_lost_and_no_line_is_wider_than_the_terminal(columns):
    """Each word occurs once in the table, so that a lost or a repeated one is noticed."""
    draw = random.Random(columns)
    for _ in range(20):
        width, height = draw.randint(1, 9), draw.randint(1, 5)
        rows = [
            [
                " ".join(f"{row}.{column}.{word}" for word in range(draw.randint(1, 4)))
                for column in range(width)
            ]
            for row in range(height)
        ]
        text = on_terminal((rows[0], rows[1:]), columns)
        assert max(map(len, text.splitlines())) <= columns
        words = text.replace("|", " ").split()
        for first, *others in rows:
            assert all(word in words for word in first.split())
            assert all(words.count(word) == 1 for cell in others for word in cell.split())


def test_the_columns_that_tell_the_rows_apart_are_repeated():
    """An empty cell means the same as the one above it."""
    head = ["method", "epoch", "who read a sample", "batches by rank"]
    rows = [["Accelerate", 1, "0" * 30, "3, 3"], ["", 2, "1" * 30, "3, 3"]]
    heads = [line for line in on_terminal((head, rows), 55).splitlines() if "method" in line]
    assert len(heads) == 2 and all("epoch" in line for line in heads)


@pytest.mark.parametrize("columns", [40, 200])
def test_a_table_in_a_pipe_does_not_depend_on_the_width_of_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    first, *others = show.table(*RULES).splitlines()
    assert len(first) > 100 and {len(line) for line in others} == {len(first)}
    assert on_terminal(RULES, 200) == show.table(*RULES)

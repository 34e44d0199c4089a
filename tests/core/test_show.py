"""Test that `show.table` returns valid Markdown, whatever its cells contain."""

from accel_demo import show


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

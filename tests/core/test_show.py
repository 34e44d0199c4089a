"""A table is Markdown whatever stands in it."""

from accel_demo import show


def test_true_and_false_are_words_and_no_numbers():
    text = show.table(["done", "count", "mixed"], [[False, 1, 1], [True, 2.5, True]])
    assert text.splitlines() == [
        "| done  | count | mixed |",
        "| ----- | ----: | ----- |",
        "| False |     1 | 1     |",
        "| True  |   2.5 | True  |",
    ]


def test_a_bar_in_a_cell_does_not_end_it():
    text = show.table(["a|b", "count"], [["`0,a|b`", 1]])
    assert text.splitlines() == [
        r"| a\|b     | count |",
        "| -------- | ----: |",
        r"| `0,a\|b` |     1 |",
    ]

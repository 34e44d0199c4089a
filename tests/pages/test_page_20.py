"""Page 20: eight collectives, an asynchronous call, and the exercise on all-reduce."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from alpha_beta import Link
from grading import Wrong

from tests.pages.pages import (
    TUTORIALS,
    load_grader,
    load_module,
    table_rows,
    transcript,
)

PAGE = "20_collectives.md"


def test_the_page_shows_the_result_of_each_collective():
    after = {}
    for name, rank, _, numbers in table_rows(PAGE, cells=4):
        if rank in ("0", "1", "2"):
            after.setdefault(name, []).append(numbers)
    sums = "111 222 333"
    assert after == {
        "broadcast": ["1 2 3"] * 3,
        "scatter": ["1", "2", "3"],
        "gather": ["1 10 100", "·", "·"],
        "all_gather": ["1 10 100"] * 3,
        "reduce": [sums, "10 20 30", "100 200 300"],
        "reduce_scatter": sums.split(),
        "all_reduce": [sums] * 3,
        "all_to_all": ["1 10 100", "2 20 200", "3 30 300"],
    }


def test_the_page_counts_messages_and_bytes():
    counts = {row[0]: row[1:] for row in table_rows(PAGE, cells=5)}
    assert counts["broadcast"] == ["2", "2", "48", "48"]
    assert counts["reduce"] == ["2", "2", "48", "24"]
    assert counts["scatter"] == ["2", "2", "16", "16"]
    assert counts["gather"] == ["2", "2", "16", "8"]
    assert counts["all_reduce"] == ["4", "4", "96", "48"]
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert counts[name] == ["6", "2", "48", "16"]
    through_rank_0, in_shares = (counts[name] for name in counts if name.startswith("`reduce"))
    assert through_rank_0 == ["1→0, 2→0; then 0→1, 0→2", "960", "480", "yes"]
    assert in_shares[0].count("→") == 12 and in_shares[1:] == ["960", "320", "yes"]


def test_the_page_shows_a_call_that_returns_before_other_ranks_have_joined():
    states = {row[0]: row[1:3] for row in table_rows(PAGE, cells=4)}
    assert states["the call has returned"] == ["have not called it", "False"]
    assert states["`wait()` has returned"] == ["have joined", "True"]


def test_the_page_shows_that_each_init_method_connects_two_processes():
    ways = [row for row in table_rows(PAGE, cells=4) if "://" in row[0]]
    assert len(ways) == 3
    assert all(row[2:] == ["2, 2", "3, 3"] for row in ways)


SECONDS = {"µs": 1e-6, "ms": 1e-3}


def seconds(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * SECONDS[unit]


def test_the_text_follows_from_the_recorded_times():
    [(command, output)] = transcript("alpha_beta").items()
    assert command == load_module(TUTORIALS / "40_record.py").RECORDS["alpha_beta"][0]
    text = (TUTORIALS / PAGE).read_text()
    assert output[output.index("| size") :].strip() in text and "2 connected processes" in output
    rows = {
        row[0]: [seconds(cell) for cell in row[1:]]
        for row in table_rows(PAGE, cells=5)
        if row[0].endswith("B")
    }
    assert len(rows) == 8
    words = " ".join(text.split())
    worst = max(abs(model / message - 1) for message, model, _, _ in rows.values())
    assert f"The model is within {10 * math.ceil(10 * worst)}% of every measured message." in words
    for size in ("8 B", "64 B", "512 B", "4 KiB", "32 KiB"):
        assert rows[size][0] == pytest.approx(1.2e-4, rel=0.12)
    ratios = [all_reduce / model for _, _, all_reduce, model in rows.values()]
    assert f"takes {min(ratios):.1f} to {max(ratios):.1f} times" in words
    [fitted] = re.findall(r"to all_reduce: +(\d+) µs \+ size / \((\S+) GB/s\)", output)
    whole = Link(float(fitted[0]) * 1e-6, float(fitted[1]) * 1e9)
    for size, mebibytes in (("2 MiB", 2), ("16 MiB", 16)):
        assert whole.message(mebibytes * 2**20) == pytest.approx(rows[size][2], rel=0.1)


def test_the_answer_on_latency_and_bandwidth_follows_from_the_model():
    link = Link(50e-6, 1e9)
    [large, small] = [link.ring_all_reduce(size, ranks=3) for size in (3e6, 3e3)]
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    assert f"= {1e3 * large:.1f} ms, versus" in text and f"= {1e6 * small:.0f} ms." in text
    times_as_long = 1000 * small / large
    next_ten = 10 * math.ceil(times_as_long / 10)
    assert f"almost {next_ten} times as long" in text and times_as_long > next_ten - 5


def test_the_time_limit_in_the_message_is_the_default_of_gloo():
    by_default = 1000 * dist.default_pg_timeout.total_seconds()
    message = f"`Timed out waiting {by_default:.0f}ms for recv operation to complete`"
    assert message in (TUTORIALS / PAGE).read_text()


def different_shapes(device):
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(2 + dist.get_rank()))
    return dist.get_world_size(), str(error.value)


def test_with_detail_every_rank_names_the_different_shapes(together):
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    for world_size, message in together(different_shapes, 2, environment=environment):
        assert world_size == 2
        assert "Detected mismatch between collectives on ranks" in message
        assert "[2]" in message and "[3]" in message


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (None, "rank 0 ends with numbers that are not a sum of the tensors"),
        ([0, 0, 0], "rank 0 ends with numbers that are not a sum of the tensors"),
        ([1, 2, 0], "rank 0 has added the tensor of rank 1 more than once"),
        ([0, 1, 1], "rank 0 has overwritten its own tensor: it ends with only the tensors of ra"),
        ([1, 0, 1], "rank 0 ends with only the tensors of ranks 0 and 2"),
        ([1, 0, 0], "the tensor of ranks 1 and 2 contains the sum, but rank 0 still has"),
    ],
)
def test_the_grader_says_which_tensors_were_added(counts, said):
    seen = [{"counts": counts, "is_mean": False, "returned_sum": False}]
    seen += [seen[0] | {"counts": [1, 1, 1]}] * 2
    with pytest.raises(Wrong, match=said):
        load_grader("20").judge(0, seen)

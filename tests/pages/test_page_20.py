"""Page 20: eight collectives, an asynchronous call, and the exercise on all-reduce."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from alpha_beta import Link
from grading import Wrong

from accel_demo.anatomy.backends import BACKENDS
from tests.pages.pages import (
    TUTORIALS,
    load_grader,
    load_module,
    table_rows,
    transcript,
)

PAGE = "20_collectives.md"


def test_the_picture_shows_the_numbers_before_and_after_each_collective():
    picture = (TUTORIALS / "20_collectives.svg").read_text()
    words = " ".join(re.findall("<!-- (.*?) -->", picture))
    shown = {
        name: re.split(r" ?rank \d ", numbers)[1:]
        for numbers, name in re.findall(r"(rank 0 .*?) → (\w+)", words)
    }
    rows, firsts, sums = ["1 2 3", "10 20 30", "100 200 300"], ["1", "10", "100"], "111 222 333"
    after = {
        "broadcast": (rows, ["1 2 3"] * 3),
        "scatter": (["1 2 3", "", ""], ["1", "2", "3"]),
        "gather": (firsts, ["1 10 100", "", ""]),
        "all_gather": (firsts, ["1 10 100"] * 3),
        "reduce": (rows, [sums, *rows[1:]]),
        "reduce_scatter": (rows, sums.split()),
        "all_reduce": (rows, [sums] * 3),
        "all_to_all": (rows, ["1 10 100", "2 20 200", "3 30 300"]),
    }
    assert shown == {
        name: [f"{left} {right}".strip() for left, right in zip(*sides, strict=True)]
        for name, sides in after.items()
    }


def test_the_page_counts_messages_and_bytes():
    rows = [row for row in table_rows(PAGE, cells=5) if row[1].isdigit()]
    counts = {row[0]: row[1:] for row in rows}
    assert counts["broadcast"] == ["2", "2", "48", "48"]
    assert counts["reduce"] == ["2", "2", "48", "24"]
    assert counts["scatter"] == ["2", "2", "16", "16"]
    assert counts["gather"] == ["2", "2", "16", "8"]
    assert counts["all_reduce"] == ["4", "4", "96", "48"]
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert counts[name] == ["6", "2", "48", "16"]
    through_rank_0, in_shares = (counts[name] for name in counts if name.startswith("`reduce"))
    assert through_rank_0 == ["4", "960", "480", "yes"]
    assert in_shares == ["12", "960", "320", "yes"]


def test_the_page_shows_a_call_that_returns_before_other_ranks_have_joined():
    states = {row[0]: row[1:3] for row in table_rows(PAGE, cells=4)}
    assert states["the call has returned"] == ["have not called it", "False"]
    assert states["`wait()` has returned"] == ["have joined", "True"]


def test_the_page_lists_every_backend_and_what_it_needs():
    rows = {row[0]: row[1:] for row in table_rows(PAGE, cells=4)}
    assert {f"`{name}`" for name in BACKENDS} < set(rows)
    assert rows["`mpi`"][1:] == ["no", "torch built from source with MPI"]
    assert rows["`gloo`"][1:] == ["yes", "nothing more"]


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
    assert len(rows) == 7
    assert "Up to 32 KiB, the time hardly changes" in text and "From 2 MiB on, it grows" in text
    for column in (0, 2):  # the message and the all-reduce
        flat = [rows[size][column] for size in ("64 B", "512 B", "4 KiB", "32 KiB")]
        assert max(flat) < 1.5 * min(flat)
        assert 8 < rows["16 MiB"][column] / rows["2 MiB"][column] < 14  # 8 times the size
        assert rows["16 MiB"][column] > rows["16 MiB"][column + 1]  # the fit
    errors = [time / fit for row in rows.values() for time, fit in (row[:2], row[2:])]
    worst = math.ceil(10 * max(max(error, 1 / error) for error in errors)) / 10
    assert f"off by a factor of up to {worst}" in " ".join(text.split())


def run_the_calls(device, calls: dict[str, str]) -> dict[str, dict[str, list[int]]]:
    """Run each call of the page on the numbers of the picture, and return what it leaves."""
    rank, results = dist.get_rank(), {}
    for name, call in calls.items():
        tensor = torch.tensor([1, 2, 3], device=device) * 10**rank
        names = {"dist": dist, "tensor": tensor, "part": tensor[:1].clone()}
        names |= {"parts": list(tensor.clone().split(1)), "received": torch.zeros_like(tensor)}
        needs_no_list = name in ("scatter", "gather") and rank > 0
        eval(call, names | {"parts": None} if needs_no_list else names)
        names["parts"] = torch.cat(names["parts"])
        left = ("tensor", "part", "parts", "received")
        results[name] = {variable: names[variable].tolist() for variable in left}
    return results


@pytest.fixture(scope="module")
def left_by_the_calls(together):
    """Return, for each rank, the variables that the calls in the page's table leave."""
    rows = [row for row in table_rows(PAGE, cells=4) if row[1].startswith("`dist.")]
    return together(run_the_calls, 3, calls={row[0].strip("*"): row[1].strip("`") for row in rows})


def test_the_calls_on_the_page_have_the_results_of_the_picture(left_by_the_calls):
    sums = [111, 222, 333]
    expected = {  # the variable with the result, and its numbers on each rank
        "broadcast": ("tensor", [[1, 2, 3]] * 3),
        "scatter": ("part", [[1], [2], [3]]),
        "gather": ("parts", [[1, 10, 100]]),
        "all-gather": ("parts", [[1, 10, 100]] * 3),
        "reduce": ("tensor", [sums]),
        "reduce-scatter": ("part", [[number] for number in sums]),
        "all-reduce": ("tensor", [sums] * 3),
        "all-to-all": ("received", [[1, 10, 100], [2, 20, 200], [3, 30, 300]]),
    }
    assert len(left_by_the_calls) == 3 and list(left_by_the_calls[0]) == list(expected)
    for name, (variable, by_rank) in expected.items():
        results = [results[name][variable] for results in left_by_the_calls]
        assert results[: len(by_rank)] == by_rank, name


def test_the_reduce_of_gloo_leaves_partial_sums_on_other_ranks(left_by_the_calls):
    left = [results["reduce"]["tensor"] for results in left_by_the_calls]
    assert left == [[111, 222, 333], [110, 220, 333], [100, 200, 303]]
    numbers = " ".join(map(str, left[1]))
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    assert f"`gloo` left {numbers} on rank 1" in text


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

"""Our collectives return the same results as torch.distributed, except for the max or min of NaN.

A mistake on one rank raises the same error on all ranks.
"""

import functools

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from accel_demo.anatomy import collectives as by_hand
from accel_demo.anatomy.collectives import OPERATIONS
from accel_demo.anatomy.wire import Wire
from tests.anatomy.programs import printed, table_rows, words_in
from tests.conftest import GPUS, VISIBLE_GPUS

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
LIBRARY = {  # the name of each operation in torch.distributed
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
cases = st.fixed_dictionaries(
    {
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 13]), max_size=3),
        "dtype": st.sampled_from(DTYPES),
        "layout": st.sampled_from(["dense", "every second", "transposed"]),
        "operation": st.sampled_from(list(OPERATIONS)),
        "root": st.integers(0, 3),
        "seed": st.integers(0, 2**20),
    }
)


def compare_with_the_library(device, examples):
    """Compare our collectives with torch.distributed in random cases, the same on all ranks.

    Returns how many cases and reductions it compared, and how many reductions were not bitwise
    equal.
    """
    counts = {"cases": 0, "reductions": 0, "not bit-equal": 0}

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def all_agree(case):
        wrong = [None] * dist.get_world_size()
        try:
            mistake = compare(case, device, counts)
        except Exception as error:  # raising it on only one rank would hang the others
            mistake = repr(error)
        dist.all_gather_object(wrong, mistake)
        assert not any(wrong), wrong  # fails on all ranks, so that all of them shrink this case

    all_agree()
    return counts


def compare(case, device, counts) -> list[str]:
    """Return the names of the collectives whose results differ from the library's."""
    wire = Wire()
    ranks, root = range(wire.world_size), case["root"] % wire.world_size
    counts["cases"] += 1

    def make(rank, number=0):  # every rank can make the tensors of all ranks
        seed = (case["seed"] * 31 + rank) * 31 + number
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(case["shape"], generator=generator) * 3
        if case["dtype"] == torch.uint8:
            values = values.abs()
        return values.to(case["dtype"]).to(device)

    def laid_out(tensor):  # the same values in a different memory layout
        if case["layout"] == "every second" and tensor.dim():
            wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
            room = wide.to(tensor)[..., ::2]
        elif case["layout"] == "transposed" and tensor.dim() > 1:
            room = (
                torch.zeros(tensor.shape[::-1]).to(tensor).permute(*reversed(range(tensor.dim())))
            )
        else:
            room = torch.zeros_like(tensor)
        return room.copy_(tensor)

    def same(ours, theirs):
        return all(map(torch.equal, ours, theirs))

    own, many = make(wire.rank), [make(wire.rank, number) for number in ranks]
    blank = torch.full_like(own, 1)

    agrees = {}
    ours, theirs = laid_out(own), own.clone()
    by_hand.broadcast(ours, root, wire)
    dist.broadcast(theirs, root)
    agrees["broadcast"] = same([ours], [theirs])

    ours, theirs = laid_out(blank), blank.clone()
    here = wire.rank == root
    by_hand.scatter(ours, [*map(laid_out, many)] if here else None, root, wire)
    dist.scatter(theirs, many if here else None, root)
    agrees["scatter"] = same([ours], [theirs])

    ours, theirs = [laid_out(blank) for _ in ranks], [blank.clone() for _ in ranks]
    by_hand.gather(laid_out(own), ours if here else None, root, wire)
    dist.gather(own, theirs if here else None, root)
    agrees["gather"] = same(ours, theirs)

    ours, theirs = [laid_out(blank) for _ in ranks], [blank.clone() for _ in ranks]
    by_hand.all_gather(ours, laid_out(own), wire)
    dist.all_gather(theirs, own)
    agrees["all_gather"] = same(ours, theirs)

    ours = [laid_out(blank) for _ in ranks]
    by_hand.all_to_all(ours, [*map(laid_out, many)], wire)
    theirs = torch.zeros(wire.world_size * own.numel()).to(own)
    dist.all_to_all_single(theirs, torch.cat([part.flatten() for part in many]))
    agrees["all_to_all"] = same([torch.cat([part.flatten() for part in ours])], [theirs])

    operation, dtype = case["operation"], case["dtype"]
    if operation == "mean" and not dtype.is_floating_point:
        # A mean of integers is an error, which `make_mistakes` checks.
        return [name for name, agree in agrees.items() if not agree]
    counts["reductions"] += 1

    def close(ours, theirs, parts):
        # Two numbers have the same sum or product in either order. gloo combines three or more in
        # a different order than we do, so the rounding differs. Maxima, minima and integers are
        # never rounded.
        if torch.equal(ours, theirs):
            return True
        counts["not bit-equal"] += 1
        if wire.world_size <= 2 or operation in ("max", "min") or not dtype.is_floating_point:
            return False
        wide = [part.double().abs() for part in parts]
        largest = functools.reduce(torch.mul if operation == "product" else torch.add, wide)
        info = torch.finfo(dtype)
        allowed = wire.world_size * info.eps * (largest + 100 * info.tiny)
        return bool(((ours.double() - theirs.double()).abs() <= allowed).all())

    parts = [make(rank) for rank in ranks]
    ours, theirs = laid_out(own), own.clone()
    by_hand.reduce(ours, root, wire, operation)
    dist.reduce(theirs, root, LIBRARY[operation])
    agrees["reduce"] = close(ours, theirs, parts) if here else torch.equal(ours, own)

    ours, theirs = laid_out(own), own.clone()
    by_hand.all_reduce(ours, wire, operation)
    dist.all_reduce(theirs, LIBRARY[operation])
    in_order = functools.reduce(OPERATIONS[operation], parts)
    in_order = in_order / wire.world_size if operation == "mean" else in_order
    agrees["all_reduce"] = close(ours, theirs, parts) and torch.equal(ours, in_order)

    ours, theirs = laid_out(blank), blank.clone()
    by_hand.reduce_scatter(ours, [*map(laid_out, many)], wire, operation)
    dist.reduce_scatter(theirs, many, LIBRARY[operation])
    parts = [make(rank, wire.rank) for rank in ranks]
    agrees["reduce_scatter"] = close(ours, theirs, parts)
    return [name for name, agree in agrees.items() if not agree]


def test_every_collective_has_the_same_result_as_the_librarys(results):
    for counts, *_ in results:
        assert counts["cases"] >= 20 and counts["reductions"] > 10
        if len(results) <= 2:
            assert counts["not bit-equal"] == 0


def run_all(device, picture=None):
    """Run everything that needs several processes, so that one launch per size is enough."""
    texts = [printed(by_hand.main, device, plot=plot) for plot in (None, picture)]
    counts, raised = compare_with_the_library(device, 20), make_mistakes(device)
    return counts, raised, with_nan(device), texts


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    return tmp_path_factory.mktemp("collectives") / "collectives.svg"


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def results(request, together, picture):
    """Return the results of `run_all` by rank. Each world size is launched once."""
    return together(run_all, request.param, picture=picture)


def with_nan(device) -> dict[str, list[float]]:
    """All-reduce a row of ones that has NaN at index r on rank r. Return the max and the min."""
    rows = {}
    for operation in ("max", "min"):
        row = torch.ones(dist.get_world_size() + 1, device=device)
        row[dist.get_rank()] = float("nan")
        by_hand.all_reduce(row, Wire(), operation)
        rows[operation] = row.tolist()
    return rows


def test_the_max_and_min_of_nan_are_nan_whichever_rank_has_it(results):
    for _, _, rows, _ in results:
        for row in rows.values():
            assert [value != value for value in row] == [True] * len(results) + [False]


def make_mistakes(device) -> list[str]:
    """Make each mistake, check its error message, and then check that collectives still work.

    Returns the messages, which must be the same on all ranks.
    """
    wire, raised = Wire(), []
    rank, world_size = wire.rank, wire.world_size
    last, is_last = world_size - 1, rank == world_size - 1
    ones, whole = torch.ones(3, device=device), torch.ones(3, device=device).long()
    needs_grad = torch.ones(3, device=device, requires_grad=True)

    def parts(count=world_size, like=ones):
        return [like.clone() for _ in range(count)]

    def call(name, *arguments):
        return functools.partial(getattr(by_hand, name), *arguments, wire)

    def reduced(name, tensor, operation):
        return functools.partial(getattr(by_hand, name), tensor, wire, operation)

    one_rank = f"(on rank {last})"
    is_int, no_rank = "must be a rank from 0 to", f"source must be a rank from 0 to {last}, got"
    not_defined = "operation {} is not defined for torch.{}"
    known = "operation must be one of sum, mean, product, max, min"
    mistakes = [  # (call, text in the error message)
        (call("broadcast", ones, world_size), f"{no_rank} {world_size}"),
        (call("scatter", ones, parts(), -1 if is_last else 0), f"got -1 {one_rank}"),
        (call("scatter", ones, parts(), 0.0), f"{no_rank} 0.0 (on rank 0)"),
        (call("gather", ones, parts(), "0"), f"target {is_int} {last}, got '0'"),
        (call("reduce", ones, None), f"target {is_int} {last}, got None"),
        (reduced("all_reduce", ones, "median"), known),
        (reduced("all_reduce", ones, numpy.ones(3)), known),
        (reduced("all_reduce", whole, "mean"), not_defined.format("mean", "int64")),
        (lambda: by_hand.reduce(whole, 0, wire, "mean"), not_defined.format("mean", "int64")),
        (
            lambda: by_hand.reduce_scatter(whole.bool(), parts(like=whole.bool()), wire, "mean"),
            not_defined.format("mean", "bool"),
        ),
        (reduced("all_reduce", ones + 0j, "max"), not_defined.format("max", "complex64")),
        (
            reduced("all_reduce", ones.to(torch.float8_e4m3fn), "sum"),
            not_defined.format("sum", "float8_e4m3fn"),
        ),
        (call("all_reduce", needs_grad), "tensor must not require grad"),
        (call("broadcast", needs_grad if is_last else ones, 0), one_rank),
        (call("all_reduce", [1.0]), "tensor must be a torch.Tensor, got list (on rank 0)"),
        (call("broadcast", None if is_last else ones, 0), f"got NoneType {one_rank}"),
        (call("all_gather", parts(last), ones), f"parts must be a list of {world_size} tensors"),
        (call("all_to_all", parts(), parts(last + 1 + is_last)), f"got {last + 2} {one_rank}"),
        (call("scatter", ones, None, 0), "tensors, got NoneType (on rank 0)"),
        (
            call("reduce_scatter", ones, [1.0] * world_size),
            "parts must be a torch.Tensor, got float (on rank 0)",
        ),
    ]
    if device.type != "cpu":
        mistakes.append((call("all_reduce", ones.cpu() if is_last else ones), " must match "))
    if world_size > 1:
        longer = torch.ones(4, device=device) if is_last else ones.clone()
        other = ones.double() if is_last else ones.clone()
        no_match = "tensor must match tensor: rank 0 sends torch.float32 of shape [3] on {0}, but "
        no_match += "rank {1} has room for torch.float64 of shape [3] on {0}"
        unlike = ("tensor must match parts", "parts must match tensor", "parts must match received")
        mistakes += [
            (call("broadcast", longer, 0), "tensor must match tensor"),
            (call("broadcast", other, 0), no_match.format(device.type, last)),
            (call("reduce", longer, 0), "tensor must match tensor"),
            (call("all_reduce", other), "tensor must match tensor"),
            (call("gather", longer, parts(), 0), unlike[0]),
            (call("all_gather", parts(), other), unlike[0]),
            (call("scatter", longer, parts(), 0), unlike[1]),
            (call("reduce_scatter", longer, parts()), unlike[1]),
            (call("all_to_all", parts(), parts(like=longer)), unlike[2]),
            (
                call("broadcast", ones, int(is_last)),
                f"rank 0 calls broadcast(source=0), but rank {last} calls broadcast(source=1)",
            ),
            (reduced("all_reduce", ones, "max" if is_last else "min"), "operation='min'"),
            (
                call("all_reduce", ones) if is_last else call("reduce", ones, 0),
                f"rank {last} calls all_reduce(operation='sum')",
            ),
        ]
    for mistake, said in mistakes:
        with pytest.raises(ValueError) as caught:
            mistake()
        raised.append(str(caught.value))
        assert said in raised[-1], (said, raised[-1])
    assert wire.sent == [] and torch.equal(ones, torch.ones_like(ones))  # nothing was sent
    with torch.no_grad():
        by_hand.all_reduce(needs_grad, wire)
    uneven = torch.zeros(rank, device=device)
    given = [torch.full((count,), float(count), device=device) for count in range(world_size)]
    by_hand.scatter(uneven, given if rank == 0 else None, 0, wire)
    results = [torch.zeros(count, device=device) for count in range(world_size)]
    by_hand.all_gather(results, uneven.requires_grad_(), wire)
    arrived = zip(results, given, strict=True)
    assert all(torch.equal(*pair) and not pair[0].requires_grad for pair in arrived)
    assert needs_grad.tolist() == [world_size] * 3
    return raised


def test_a_mistake_of_one_rank_is_the_same_error_on_all_before_anything_is_sent(results):
    assert all(raised == results[0][1] for _, raised, *_ in results)
    assert len(results[0][1]) == (20 if len(results) == 1 else 32)


def test_each_collective_sends_the_messages_and_bytes_of_its_algorithm(results, picture):
    n, (text, beside_picture) = len(results), results[0][3]
    others, rounds_of_the_tree, row = n - 1, (n - 1).bit_length(), 8 * n  # `row`: bytes in a row
    pairs = [n * others, others, n * others * 8, others * 8]  # sent by the busiest rank
    rows = [row for row in table_rows(text) if len(row) == 5][1:]
    by_name = {name: list(map(int, numbers)) for name, *numbers in rows}
    assert by_name == {
        "broadcast": [others, rounds_of_the_tree, others * row, rounds_of_the_tree * row],
        "scatter": [others, others, others * 8, others * 8],
        "gather": [others, others, others * 8, 8 * (n > 1)],
        "all_gather": pairs,
        "reduce": [others, others, others * row, row * (n > 1)],
        "reduce_scatter": pairs,
        "all_reduce": [
            2 * others,
            others + rounds_of_the_tree,
            2 * others * row,
            rounds_of_the_tree * row,
        ],
        "all_to_all": pairs,
    }
    assert {"all_to_all", "rank 0", "1" * n} <= words_in(picture)
    assert beside_picture in text and len(table_rows(beside_picture)) == 1 + len(by_name)
    numbers = [row for row in table_rows(text) if len(row) == 4][1:]
    assert len(numbers) == n * len(by_name)
    sums = " ".join(str(column * int("1" * n)) for column in range(1, n + 1))
    assert [row[3] for row in numbers if row[0] == "all_reduce"] == [sums] * n


@pytest.mark.slow
def test_too_many_processes_for_the_picture_are_an_error_of_one_line(start):
    result = start(["python", "-m", "accel_demo.anatomy.collectives", "--processes", 7])
    assert result.returncode == 2
    assert result.stderr == "error: the picture has room for only 6 processes. Start fewer.\n"


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_the_collectives_are_correct_on_gpus(together):
    """`DTYPES` contains only dtypes that NCCL supports (not int16, for example)."""
    ran = together(run_all, 2, environment=VISIBLE_GPUS)
    test_every_collective_has_the_same_result_as_the_librarys(ran)
    test_the_max_and_min_of_nan_are_nan_whichever_rank_has_it(ran)
    assert ran[0][1] == ran[1][1] and len(ran[0][1]) == 33  # one more: a tensor on the CPU

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


def compare(case, device, counts) -> str:
    """Return the name of the first collective whose result differs from the library's, or ""."""
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

    ours, theirs = laid_out(own), own.clone()
    by_hand.broadcast(ours, root, wire)
    dist.broadcast(theirs, root)
    if not same([ours], [theirs]):
        return "broadcast"

    ours, theirs = laid_out(blank), blank.clone()
    here = wire.rank == root
    by_hand.scatter(ours, [*map(laid_out, many)] if here else None, root, wire)
    dist.scatter(theirs, many if here else None, root)
    if not same([ours], [theirs]):
        return "scatter"

    ours, theirs = [laid_out(blank) for _ in ranks], [blank.clone() for _ in ranks]
    by_hand.gather(laid_out(own), ours if here else None, root, wire)
    dist.gather(own, theirs if here else None, root)
    if not same(ours, theirs):
        return "gather"

    ours, theirs = [laid_out(blank) for _ in ranks], [blank.clone() for _ in ranks]
    by_hand.all_gather(ours, laid_out(own), wire)
    dist.all_gather(theirs, own)
    if not same(ours, theirs):
        return "all_gather"

    ours = [laid_out(blank) for _ in ranks]
    by_hand.all_to_all(ours, [*map(laid_out, many)], wire)
    theirs = torch.zeros(wire.world_size * own.numel()).to(own)
    dist.all_to_all_single(theirs, torch.cat([part.flatten() for part in many]))
    if not same([torch.cat([part.flatten() for part in ours])], [theirs]):
        return "all_to_all"

    operation, dtype = case["operation"], case["dtype"]
    if operation == "mean" and not dtype.is_floating_point:
        return ""  # a mean of integers is an error, which `make_mistakes` checks
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
    if not (close(ours, theirs, parts) if here else torch.equal(ours, own)):
        return "reduce"

    ours, theirs = laid_out(own), own.clone()
    by_hand.all_reduce(ours, wire, operation)
    dist.all_reduce(theirs, LIBRARY[operation])
    in_order = functools.reduce(OPERATIONS[operation], parts)
    in_order = in_order / wire.world_size if operation == "mean" else in_order
    if not close(ours, theirs, parts) or not torch.equal(ours, in_order):
        return "all_reduce"

    ours, theirs = laid_out(blank), blank.clone()
    by_hand.reduce_scatter(ours, [*map(laid_out, many)], wire, operation)
    dist.reduce_scatter(theirs, many, LIBRARY[operation])
    if not close(ours, theirs, [make(rank, wire.rank) for rank in ranks]):
        return "reduce_scatter"
    return ""


def test_every_collective_has_the_same_result_as_the_librarys(results):
    for counts, *_ in results:
        assert counts["cases"] >= 20 and counts["reductions"] > 10
        if len(results) <= 2:
            assert counts["not bit-equal"] == 0


def run_all(device):
    """Return the results of `compare_with_the_library`, `make_mistakes` and `with_nan`."""
    counts = compare_with_the_library(device, 20)
    return counts, *make_mistakes(device), with_nan(device)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def results(request, together):
    """Return the results of `run_all` by rank. Each world size is launched once."""
    return together(run_all, request.param)


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
    for *_, rows in results:
        for row in rows.values():
            assert [value != value for value in row] == [True] * len(results) + [False]


def make_mistakes(device):
    """Return this rank's error for each mistake, and whether collectives still work afterwards."""
    wire, raised = Wire(), {}
    rank, world_size = wire.rank, wire.world_size
    ones, is_last = torch.ones(3, device=device), wire.rank == world_size - 1
    needs_grad = torch.ones(3, device=device, requires_grad=True)

    def parts(count=world_size, like=ones):
        return [like.clone() for _ in range(count)]

    longer = torch.ones(4, device=device) if is_last else ones.clone()
    other = ones.double() if is_last else ones.clone()
    whole = ones.long()
    mistakes = {
        "source": lambda: by_hand.broadcast(ones, world_size, wire),
        "source, one rank": lambda: by_hand.scatter(ones, parts(), 0 if not is_last else -1, wire),
        "target": lambda: by_hand.gather(ones, parts(), "0", wire),
        "target of reduce": lambda: by_hand.reduce(ones, None, wire),
        "operation": lambda: by_hand.all_reduce(ones, wire, "median"),
        "mean of integers": lambda: by_hand.all_reduce(whole, wire, "mean"),
        "mean of integers, reduce": lambda: by_hand.reduce(whole, 0, wire, "mean"),
        "mean of bool": lambda: by_hand.reduce_scatter(
            whole.bool(), parts(like=whole.bool()), wire, "mean"
        ),
        "max of complex": lambda: by_hand.all_reduce(ones + 0j, wire, "max"),
        "requires grad": lambda: by_hand.all_reduce(needs_grad, wire),
        "requires grad, one": lambda: by_hand.broadcast(needs_grad if is_last else ones, 0, wire),
        "not a tensor": lambda: by_hand.all_reduce([1.0, 2.0], wire),
        "not a tensor, one": lambda: by_hand.broadcast(None if is_last else ones, 0, wire),
        "list too short": lambda: by_hand.all_gather(parts(world_size - 1), ones, wire),
        "list too long, one": lambda: by_hand.all_to_all(
            parts(), parts(world_size + is_last), wire
        ),
        "no list": lambda: by_hand.scatter(ones, None, 0, wire),
        "list of numbers": lambda: by_hand.reduce_scatter(ones, [1.0] * world_size, wire),
        "source is not an int": lambda: by_hand.scatter(ones, parts(), 0.0, wire),
        "operation is not a string": lambda: by_hand.all_reduce(ones, wire, numpy.ones(3)),
        "sum of float8": lambda: by_hand.all_reduce(ones.to(torch.float8_e4m3fn), wire),
    }
    if device.type != "cpu":
        on_cpu = ones.cpu() if is_last else ones
        mistakes["one on the CPU"] = lambda: by_hand.all_reduce(on_cpu, wire)
    if world_size > 1:
        mistakes |= {
            "shape of broadcast": lambda: by_hand.broadcast(longer, 0, wire),
            "dtype of broadcast": lambda: by_hand.broadcast(other, 0, wire),
            "shape of reduce": lambda: by_hand.reduce(longer, 0, wire),
            "dtype of all_reduce": lambda: by_hand.all_reduce(other, wire),
            "shape of scatter": lambda: by_hand.scatter(longer, parts(), 0, wire),
            "shape of gather": lambda: by_hand.gather(longer, parts(), 0, wire),
            "dtype of all_gather": lambda: by_hand.all_gather(parts(), other, wire),
            "shape of all_to_all": lambda: by_hand.all_to_all(parts(), parts(like=longer), wire),
            "shape of reduce_scatter": lambda: by_hand.reduce_scatter(longer, parts(), wire),
            "two sources": lambda: by_hand.broadcast(ones, int(is_last), wire),
            "two operations": lambda: by_hand.all_reduce(ones, wire, "max" if is_last else "min"),
            "two collectives": lambda: (
                by_hand.all_reduce(ones, wire) if is_last else by_hand.reduce(ones, 0, wire)
            ),
        }
    for name, mistake in mistakes.items():
        with pytest.raises(ValueError) as caught:
            mistake()
        raised[name] = str(caught.value)
    assert wire.sent == [] and torch.equal(ones, torch.ones_like(ones))  # nothing was sent
    with torch.no_grad():
        by_hand.all_reduce(needs_grad, wire)
    uneven = torch.zeros(rank, device=device)
    given = [torch.full((count,), float(count), device=device) for count in range(world_size)]
    by_hand.scatter(uneven, given if rank == 0 else None, 0, wire)
    results = [torch.zeros(count, device=device) for count in range(world_size)]
    by_hand.all_gather(results, uneven.requires_grad_(), wire)
    arrived = zip(results, given, strict=True)
    is_right = all(torch.equal(*pair) and not pair[0].requires_grad for pair in arrived)
    return raised, is_right and needs_grad.tolist() == [world_size] * 3


def test_a_mistake_of_one_rank_is_the_same_error_on_all_before_anything_is_sent(
    results, device="cpu"
):
    raised, processes = results[0][1], len(results)
    assert all(errors == raised and is_right for _, errors, is_right, _ in results)
    last = processes - 1
    assert raised["source"].startswith(f"source must be a rank from 0 to {last}, got {processes}")
    assert raised["source, one rank"].endswith(f"got -1 (on rank {last})")
    assert raised["target"].startswith(f"target must be a rank from 0 to {last}, got '0'")
    assert raised["target of reduce"].startswith("target must be a rank")
    assert raised["operation"].startswith("operation must be one of sum, mean, product, max, min")
    for name in ("mean of integers", "mean of integers, reduce"):
        assert raised[name] == "operation mean is not defined for torch.int64 (on rank 0)"
    assert raised["mean of bool"].startswith("operation mean is not defined for torch.bool")
    assert raised["max of complex"].startswith("operation max is not defined for torch.complex64")
    assert raised["requires grad"].startswith("tensor must not require grad")
    assert raised["requires grad, one"].endswith(f"(on rank {last})")
    assert raised["not a tensor"] == "tensor must be a torch.Tensor, got list (on rank 0)"
    assert raised["not a tensor, one"].startswith("tensor must be a torch.Tensor, got NoneType")
    assert raised["list too short"].startswith(f"parts must be a list of {processes} tensors")
    assert raised["list too long, one"].endswith(f"got {processes + 1} (on rank {last})")
    assert raised["no list"].endswith("tensors, got NoneType (on rank 0)")
    assert raised["list of numbers"] == "parts must be a torch.Tensor, got float (on rank 0)"
    assert raised["source is not an int"].endswith(f"from 0 to {last}, got 0.0 (on rank 0)")
    assert raised["operation is not a string"].startswith("operation must be one of sum, mean")
    assert raised["sum of float8"].startswith("operation sum is not defined for torch.float8")
    if processes == 1:
        return
    mismatched = {name for name in raised if name.startswith(("shape", "dtype"))}
    assert len(mismatched) == 9
    for name in mismatched:
        assert " must match " in raised[name] and raised[name].startswith(("tensor ", "parts "))
    assert raised["dtype of broadcast"] == (
        f"tensor must match tensor: rank 0 sends torch.float32 of shape [3] on {device}, but rank "
        f"{last} has room for torch.float64 of shape [3] on {device}"
    )
    assert raised["two sources"] == (
        f"rank 0 calls broadcast(source=0), but rank {last} calls broadcast(source=1)"
    )
    assert "operation='min'" in raised["two operations"]
    assert f"rank {last} calls all_reduce(operation='sum')" in raised["two collectives"]


def numbers_in(table: str) -> dict[str, list[int]]:
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [int(cell) for cell in row[1:]] for row in rows[2:]}


def test_each_collective_sends_the_messages_and_bytes_of_its_algorithm(start, tmp_path):
    for n in (1, 4):
        picture = tmp_path / f"{n}.svg"
        command = ["python", "-m", "accel_demo.anatomy.collectives", "--processes", n]
        result = start([*command, "--plot", picture])
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"{n} connected process{'es' if n > 1 else ''} on cpu")
        _, counts = result.stdout.split("| collective     | messages", 1)
        row = 8 * n  # bytes in a row of n numbers, 8 bytes each
        others, rounds_of_the_tree = n - 1, (n - 1).bit_length()
        pairs = [n * others, others, n * others * 8, others * 8]  # sent by the busiest rank
        assert numbers_in("| collective | messages" + counts) == {
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
        drawn = picture.read_text()
        assert all(f"<!-- {name} -->" in drawn for name in ("all_to_all", "rank 0", "1" * n))


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
    test_a_mistake_of_one_rank_is_the_same_error_on_all_before_anything_is_sent(ran, "cuda")
    assert " must match " in ran[0][1]["one on the CPU"]

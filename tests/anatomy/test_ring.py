"""Three all-reduces of messages: right sums, bytes as the formulas say, and never a hang."""

import random
import re

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_demo.anatomy import ring, traffic
from accel_demo.anatomy.wire import Wire
from tests.conftest import GPUS, VISIBLE_GPUS

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLES = [torch.int64, torch.int32, torch.int8, torch.uint8]
STEPS = {
    "gather + broadcast": lambda ranks: 2 * (ranks - 1),
    "naive ring": lambda ranks: ranks - 1,
    "chunked ring": lambda ranks: 2 * (ranks - 1),
}


LAYOUTS = ["contiguous", "transposed", "every second"]
# (dtype, whether the mean, how it lies in memory)
KINDS = [(dtype, mean, lies) for dtype in FLOATS for mean in (False, True) for lies in LAYOUTS]
KINDS += [(dtype, False, lies) for dtype in WHOLES for lies in LAYOUTS]
SHAPES = st.lists(st.integers(0, 9), max_size=3)
SEEDS = st.integers(0, 2**31)


def drawn(kinds=KINDS * 2) -> list:
    """For each kind: dtype, shape, layout, mean, and a seed for the values.

    The same in every run. They are drawn here, so that all ranks are given the same.
    """
    drawn = []

    @settings(max_examples=10 * len(kinds), derandomize=True, database=None, deadline=None)
    @given(SHAPES, SEEDS)
    def collect(shape, seed):
        if (shape, seed) not in drawn:
            drawn.append((shape, seed))

    collect()
    pairs = zip(kinds, drawn[: len(kinds)], strict=True)
    return [(dtype, shape, lies, mean, seed) for (dtype, mean, lies), (shape, seed) in pairs]


def make(case, rank: int, device) -> torch.Tensor:
    dtype, shape, layout, _, seed = case
    numbers = random.Random(f"{seed} {rank}")
    elements = 1
    for size in shape:
        elements *= size
    if dtype.is_floating_point:  # of many magnitudes, so that the order of a sum is seen
        values = [numbers.gauss(0, 1) * 10 ** numbers.randint(-3, 3) for _ in range(elements)]
    else:  # some sums overflow, as they do in the library
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        values = [numbers.randint(low, high) for _ in range(elements)]
    tensor = torch.tensor(values, dtype=dtype, device=device).view(shape)
    if layout == "transposed" and shape:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second" and shape:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor


def every_case(device, cases):
    """Of each all-reduce and case: both results, the layout kept, what was sent; and errors."""
    rank, found = dist.get_rank(), []
    for name, all_reduce in ring.ALGORITHMS.items():
        for case in cases:
            mine, mean = make(case, rank, device), case[3]
            library = mine.clone()
            dist.all_reduce(library)
            if mean:
                library /= dist.get_world_size()
            wire, total = Wire(), make(case, rank, device)
            place = total.data_ptr(), total.stride()
            all_reduce(total, wire, mean)
            in_place = place == (total.data_ptr(), total.stride())
            found.append((name, case, mine.cpu(), total.cpu(), library.cpu(), in_place, wire.sent))
    return found, errors(device), one_and_its_loss(device)


def errors(device) -> list[str]:
    """What each all-reduce says of wrong input, on one rank alone where there are several."""
    last, said = dist.get_rank() == dist.get_world_size() - 1, []
    ones = torch.ones(3, device=device)
    wrong = [  # (the tensor and mean of all ranks but the last, those of the last)
        ((ones, False), (ones.clone().requires_grad_(), False)),
        ((ones.long(), True), (ones.long(), True)),
        ((ones, False), (ones.bool(), False)),
        ((ones, False), (ones.cfloat(), False)),
        ((ones, False), (ones.to_sparse(), False)),
        ((ones, False), (ones[:1].expand(3), False)),
        ((ones, False), (torch.ones(3, device="meta"), False)),
        ((ones, False), ((1j * ones).conj().imag, False)),
        ((ones, False), (torch.inference_mode()(ones.clone)(), False)),
        ((ones, False), (torch.nested.nested_tensor([ones], layout=torch.strided), False)),
        ((ones, False), (numpy.ones(3), False)),
        ((ones, False), ([1.0], False)),
        ((ones, False), (torch.ones(4, device=device), False)),
        ((ones, False), (ones.double(), False)),
        ((ones, False), (ones, True)),
    ]
    for all_reduce in ring.ALGORITHMS.values():
        for others, of_last in wrong:
            said.append(message(all_reduce, *(of_last if last else others)))
    mixed = ring.all_reduce_naive_ring if last else ring.all_reduce_chunked_ring
    return [*said, message(mixed, ones, False)]


def message(all_reduce, tensor, mean) -> str:
    wire = Wire()
    try:
        all_reduce(tensor, wire, mean)
    except ValueError as error:
        assert not wire.sent
        return str(error)
    return ""


def one_and_its_loss(device) -> dict[str, float]:
    """The sums of 1e8, 1 and −1e8, of which float32 gives 0 or 1, as the order is."""
    mine, sums = [1e8, 1.0, -1e8, 0.0][dist.get_rank()], {}
    for name, all_reduce in ring.ALGORITHMS.items():
        total = torch.full((1,), mine, device=device)
        all_reduce(total, Wire())
        sums[name] = total.item()
    return sums


LAUNCHED = {}  # one launch for each number of ranks; the tests below look at different things


@pytest.fixture(params=[1, 2, 3, 4])
def ran(request, together):
    ranks = request.param
    if ranks not in LAUNCHED:
        LAUNCHED[ranks] = together(every_case, ranks, cases=drawn())
    return LAUNCHED[ranks]


def by_case(ran):
    """For each all-reduce and case, what the ranks have found, by rank."""
    together = list(zip(*(found for found, _, _ in ran), strict=True))
    assert len(together) == 3 * len(KINDS * 2)
    return together


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, and −0 is not 0."""
    zeros = a == 0
    signs = torch.equal(torch.signbit(a[zeros]), torch.signbit(b[zeros]))
    return a.dtype == b.dtype and torch.equal(a, b) and signs


def bound(case, mine: list[torch.Tensor]) -> torch.Tensor:
    """How far two sums of the same N numbers, in any two orders, can be from each other.

    Each of the N − 1 additions rounds by at most half an epsilon of what it gives, which is never
    much more than the sum of the sizes. That is (N−1)·epsilon/2 for either sum, plus terms in
    epsilon² for which there is a factor of 1.1 (here N·epsilon < 0.04). A mean rounds once more.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 4.2.
    """
    dtype, _, _, mean, _ = case
    information = torch.finfo(dtype)
    sizes = sum(one.double().abs() for one in mine)
    roundings = len(mine) - 1
    if not mean:
        return 1.1 * roundings * information.eps * sizes
    smallest = information.smallest_normal * information.eps
    return 1.1 * (roundings + 1) * information.eps * sizes / len(mine) + smallest


def test_the_sum_is_that_of_the_library(ran):
    """With the same bits up to two ranks, as a + b is b + a; within the rounding error beyond."""
    for ranks in by_case(ran):
        name, case = ranks[0][:2]
        mine = [one[2] for one in ranks]
        for _, _, _, total, library, _, _ in ranks:
            if len(ranks) <= 2 or not case[0].is_floating_point:
                assert same_bits(total, library), (name, case)
            else:
                distance = (total.double() - library.double()).abs()
                assert bool((distance <= bound(case, mine)).all()), (name, case)


def test_all_ranks_end_with_the_same_bits_but_in_the_naive_ring(ran):
    for ranks in by_case(ran):
        name, case = ranks[0][:2]
        if name != "naive ring" or not case[0].is_floating_point:
            assert all(same_bits(ranks[0][3], one[3]) for one in ranks), (name, case)


def test_in_the_naive_ring_ranks_differ_as_each_adds_in_another_order(ran):
    sums = [sums for _, _, sums in ran]
    naive = {one["naive ring"] for one in sums}
    assert naive == ({0.0, 1.0} if len(ran) > 2 else {1e8})
    for name in ("gather + broadcast", "chunked ring"):
        assert len({one[name] for one in sums}) == 1


def test_the_result_is_written_in_place_whatever_the_layout(ran):
    for ranks in by_case(ran):
        assert all(in_place for *_, in_place, _ in ranks)
    assert {case[2] for found, _, _ in ran for _, case, *_ in found} > {"transposed"}


def test_the_bytes_of_each_rank_are_those_of_the_formula(ran):
    for ranks in by_case(ran):
        name, case, mine = ranks[0][:3]
        sizes = traffic.chunk_sizes(mine.numel(), mine.element_size(), len(ranks))
        log = [message for *_, sent in ranks for message in sent]
        for rank in range(len(ranks)):
            expected = traffic.FORMULAS[name][0](rank, sizes)
            assert traffic.counted(log, rank) == expected, (name, case)


def test_the_steps_are_those_expected_and_a_ring_sends_to_the_right_alone(ran):
    count = len(ran)
    for ranks in by_case(ran):
        name = ranks[0][0]
        log = [message for *_, sent in ranks for message in sent]
        assert {message.step for message in log} == set(range(1, STEPS[name](count) + 1))
        if name != "gather + broadcast":
            assert all(one.target == (one.source + 1) % count for one in log)
            assert len(log) == STEPS[name](count) * count  # all send in each step
        else:
            assert len(log) == STEPS[name](count)  # one message at a time, all with rank 0
            assert all(0 in (one.source, one.target) for one in log)


def test_every_chunk_grows_by_one_rank_a_step_and_is_then_copied(ran):
    count = len(ran)
    for ranks in by_case(ran):
        if ranks[0][0] == "chunked ring":
            log = [message for *_, sent in ranks for message in sent]
            states = traffic.holdings(log, count)
            half = states[count - 1]  # after the reduce-scatter
            assert all(half[rank][rank] == set(range(count)) for rank in range(count))
            assert states[-1] == [[set(range(count))] * count] * count


def test_wrong_input_is_one_value_error_on_all_ranks_before_any_message(ran):
    said = [said for _, said, _ in ran]
    assert all(one == said[0] for one in said)
    named = ["tensor must not require grad", "mean must be False"]
    named += [*["tensor must hold real numbers"] * 2, "tensor must be dense"]
    named += ["tensor must have memory for each element", "tensor must hold values"]
    named += ["tensor must be no view of a conjugate", "tensor must not be from torch.inference"]
    named += ["tensor must be dense", *["tensor takes torch.Tensor"] * 2]
    alone = ["", "", ""]  # a rank that is alone agrees with itself
    unlike = ["tensor must match tensor", "tensor must match tensor", "rank 0 calls"]
    expected = [*named, *(alone if len(ran) == 1 else unlike)] * 3
    expected.append("" if len(ran) == 1 else "rank 0 calls all_reduce_chunked_ring")
    assert len(said[0]) == len(expected)
    for sentence, start in zip(said[0], expected, strict=True):
        assert sentence.startswith(start) and bool(sentence) == bool(start), sentence


@settings(derandomize=True, database=None)
@given(st.integers(1, 70), st.integers(0, 1000), st.sampled_from([1, 2, 4, 8]))
def test_the_chunked_ring_sends_as_much_in_all_as_gather_and_broadcast(ranks, length, element_size):
    sizes = traffic.chunk_sizes(length, element_size, ranks)
    cut = ring.split(torch.empty(length), ranks)
    assert sizes == [len(chunk) * element_size for chunk in cut]
    size = length * element_size
    for bytes_of in (traffic.chunked_ring_bytes, traffic.gather_broadcast_bytes):
        by_rank = [bytes_of(rank, sizes) for rank in range(ranks)]
        assert sum(sent for sent, _ in by_rank) == 2 * (ranks - 1) * size
        assert sum(received for _, received in by_rank) == 2 * (ranks - 1) * size
    for rank in range(ranks):
        sent, received = traffic.chunked_ring_bytes(rank, sizes)
        if length % ranks == 0:
            assert sent == received == 2 * (ranks - 1) * size // ranks
        # Else at most two chunks are longer or shorter than the mean one, by less than an element.
        assert abs(sent * ranks - 2 * (ranks - 1) * size) < 2 * element_size * ranks


def test_a_rank_of_the_chunked_ring_sends_less_than_two_tensors_however_many_there_are():
    for ranks in range(1, 2000):
        sizes = [3] * ranks
        assert traffic.chunked_ring_bytes(0, sizes)[0] < 2 * sum(sizes)
        assert traffic.naive_ring_bytes(0, sizes)[0] == (ranks - 1) * sum(sizes)


def test_the_program_shows_steps_and_bytes_and_draws_them(start, tmp_path):
    picture = tmp_path / "ring.svg"
    command = ["python", "-m", "accel_demo.anatomy.ring", "--processes", "3", "--plot", picture]
    result = start(command)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("3 connected processes on cpu (gloo)")
    rows = [[cell.strip() for cell in row.split("|")] for row in result.stdout.splitlines()]
    steps = [row[1:-1] for row in rows if len(row) > 1 and row[1].isdigit()]
    assert steps == [
        ["1", "reduce-scatter", "chunk 2", "chunk 0", "chunk 1"],
        ["2", "reduce-scatter", "chunk 1", "chunk 2", "chunk 0"],
        ["3", "all-gather", "chunk 0", "chunk 1", "chunk 2"],
        ["4", "all-gather", "chunk 2", "chunk 0", "chunk 1"],
    ]
    assert result.stdout.count("to the byte") == 6 and "NO" not in result.stdout
    assert "3 of 3 give what dist.all_reduce gives." in result.stdout
    assert {"step 4", "in the end", "chunked ring, each rank"} <= words(picture)


def test_one_rank_alone_is_drawn_too(tmp_path):
    traffic.draw({name: [] for name in traffic.FORMULAS}, [12], tmp_path / "alone.svg")
    assert "step 1" not in words(tmp_path / "alone.svg")
    assert {"in the end", "chunked ring, each rank"} <= words(tmp_path / "alone.svg")


def words(picture) -> set[str]:
    return set(re.findall("<!-- (.*?) -->", picture.read_text()))


def test_a_wrong_number_of_processes_is_one_line(start):
    result = start(["python", "-m", "accel_demo.anatomy.ring", "--processes", "0"])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --processes must be at least 1, got 0\n"


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_the_sums_and_bytes_are_right_on_gpus(together):
    ran = together(every_case, 2, environment=VISIBLE_GPUS, cases=drawn())
    test_the_sum_is_that_of_the_library(ran)
    test_the_bytes_of_each_rank_are_those_of_the_formula(ran)
    test_wrong_input_is_one_value_error_on_all_ranks_before_any_message(ran)

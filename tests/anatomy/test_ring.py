"""Three all-reduce algorithms have correct sums, send the expected bytes, and never hang."""

import math
import random
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_demo.anatomy import ring, traffic
from accel_demo.anatomy.wire import Message, Wire
from tests.anatomy.programs import printed, table_rows, words_in
from tests.conftest import GPUS, VISIBLE_GPUS

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
STEPS = {
    "gather + broadcast": lambda ranks: 2 * (ranks - 1),
    "naive ring": lambda ranks: ranks - 1,
    "chunked ring": lambda ranks: 2 * (ranks - 1),
}


LAYOUTS = ["contiguous", "transposed", "every second"]
# (dtype, True for a mean, memory layout)
KINDS = [(dtype, mean, layout) for dtype in FLOATS for mean in (False, True) for layout in LAYOUTS]
KINDS += [(dtype, False, layout) for dtype in INTEGERS for layout in LAYOUTS]
SHAPES = [[], [0], [1], [2], [3], [7], [5, 3], [2, 9], [4, 0, 2], [9, 8, 7]]
# (dtype, shape, memory layout, True for a mean, seed of the values). The number of shapes and the
# number of layouts have no common divisor, so every layout has every shape.
CASES = [
    (dtype, SHAPES[seed % len(SHAPES)], layout, mean, seed)
    for seed, (dtype, mean, layout) in enumerate(KINDS)
]


def make(case, rank: int, device) -> torch.Tensor:
    dtype, shape, layout, _, seed = case
    numbers = random.Random(f"{seed} {rank}")
    elements = math.prod(shape)
    if dtype.is_floating_point:  # many magnitudes, so that the order of summation matters
        values = [numbers.gauss(0, 1) * 10 ** numbers.randint(-3, 3) for _ in range(elements)]
    else:  # some sums overflow, in the library as well
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        values = [numbers.randint(low, high) for _ in range(elements)]
    tensor = torch.tensor(values, dtype=dtype, device=device).view(shape)
    if layout == "transposed" and shape:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second" and shape:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor


@dataclass
class RingResult:
    """The result of one all-reduce algorithm for one case on one rank."""

    name: str
    case: tuple
    tensor: torch.Tensor
    total: torch.Tensor
    library: torch.Tensor
    is_in_place: bool
    sent: list[Message]


def every_case(device, picture=None):
    """Run each all-reduce on each case, and everything else that needs several processes.

    Returns the results, the errors, the rounded sums, the sums of gloo and of two rings, and what
    the program prints.
    """
    rank, results = dist.get_rank(), []
    for name, all_reduce in ring.ALGORITHMS.items():
        for case in CASES:
            tensor, mean = make(case, rank, device), case[3]
            library = tensor.clone()
            dist.all_reduce(library)
            if mean:
                library /= dist.get_world_size()
            wire, total = Wire(), make(case, rank, device)
            place = total.data_ptr(), total.stride()
            all_reduce(total, wire, mean)
            is_in_place = place == (total.data_ptr(), total.stride())
            tensors = tensor.cpu(), total.cpu(), library.cpu()
            results.append(RingResult(name, case, *tensors, is_in_place, wire.sent))
    sums = sums_of_gloo_and_of_rings(device)
    texts = [printed(ring.main, device, guess=8000, plot=plot) for plot in (None, picture)]
    return results, errors(device), rounded_sums(device), sums, texts


def errors(device) -> list[str]:
    """Return the errors of each all-reduce for invalid input on the last rank or on all ranks."""
    last, messages = dist.get_rank() == dist.get_world_size() - 1, []
    ones = torch.ones(3, device=device)
    wrong = [  # ((tensor, mean) on all ranks but the last, (tensor, mean) on the last rank)
        ((ones, False), (ones.clone().requires_grad_(), False)),
        ((ones.long(), True), (ones.long(), True)),
        ((ones, False), (ones.bool(), False)),
        ((ones, False), (ones.to(torch.complex64), False)),
        ((ones, False), (numpy.ones(3), False)),
        ((ones, False), ([1.0], False)),
        ((ones, False), (torch.ones(4, device=device), False)),
        ((ones, False), (ones.double(), False)),
        ((ones, False), (ones, True)),
    ]
    for all_reduce in ring.ALGORITHMS.values():
        for others, of_last in wrong:
            messages.append(message(all_reduce, *(of_last if last else others)))
    mixed = ring.all_reduce_naive_ring if last else ring.all_reduce_chunked_ring
    return [*messages, message(mixed, ones, False)]


def message(all_reduce, tensor, mean) -> str:
    wire = Wire()
    try:
        all_reduce(tensor, wire, mean)
    except ValueError as error:
        assert not wire.sent
        return str(error)
    return ""


def rounded_sums(device) -> dict[str, float]:
    """Sum 1e8, 1 and −1e8 in float32. The order of addition decides whether the sum is 0 or 1."""
    value, sums = [1e8, 1.0, -1e8, 0.0][dist.get_rank()], {}
    for name, all_reduce in ring.ALGORITHMS.items():
        total = torch.full((1,), value, device=device)
        all_reduce(total, Wire())
        sums[name] = total.item()
    return sums


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    return tmp_path_factory.mktemp("ring") / "ring.svg"


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ran(request, together, picture):
    return together(every_case, request.param, picture=picture)


def by_case(ran) -> list[tuple[RingResult, ...]]:
    """Return one tuple with the results of all ranks for each all-reduce and case."""
    cases = list(zip(*(results for results, *_ in ran), strict=True))
    assert len(cases) == 3 * len(CASES)
    return cases


def messages_of(ranks: tuple[RingResult, ...]) -> list[Message]:
    return [message for rank in ranks for message in rank.sent]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the tensors are equal and their zeros have equal signs."""
    zeros = a == 0
    signs = torch.equal(torch.signbit(a[zeros]), torch.signbit(b[zeros]))
    return a.dtype == b.dtype and torch.equal(a, b) and signs


def bound(case, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return an upper bound for the difference between two sums of the same N numbers.

    The sums may add the numbers in different orders. Each of the N − 1 additions has a rounding
    error of at most epsilon/2 times its result, and no result is much larger than S, the sum of
    the absolute values. So each sum has an error of at most (N−1)·epsilon/2·S, and two sums differ
    by at most twice that. A factor of 1.1 covers the terms in epsilon² (N·epsilon < 0.04 here). A
    mean is rounded once more.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 4.2.
    """
    dtype, _, _, mean, _ = case
    information = torch.finfo(dtype)
    sizes = torch.stack([tensor.double().abs() for tensor in tensors]).sum(dim=0)
    roundings = len(tensors) - 1
    if not mean:
        return 1.1 * roundings * information.eps * sizes
    smallest = information.smallest_normal * information.eps
    return 1.1 * (roundings + 1) * information.eps * sizes / len(tensors) + smallest


def test_sums_agree_with_those_of_the_library(ran):
    """With one or two ranks, or with integers, the order of addition does not change the sum.

    In these cases, all bits must be equal. In other cases, the sums may have rounding errors.
    """
    for ranks in by_case(ran):
        name, case = ranks[0].name, ranks[0].case
        tensors = [rank.tensor for rank in ranks]
        for rank in ranks:
            if len(ranks) <= 2 or not case[0].is_floating_point:
                assert same_bits(rank.total, rank.library), (name, case)
            else:
                distance = (rank.total.double() - rank.library.double()).abs()
                assert bool((distance <= bound(case, tensors)).all()), (name, case)


def test_results_are_bitwise_equal_on_all_ranks_except_in_the_naive_ring(ran):
    for ranks in by_case(ran):
        name, case = ranks[0].name, ranks[0].case
        if name != "naive ring" or not case[0].is_floating_point:
            assert all(same_bits(ranks[0].total, rank.total) for rank in ranks), (name, case)


def test_in_the_naive_ring_each_rank_adds_in_a_different_order(ran):
    by_rank = [sums for _, _, sums, *_ in ran]
    naive = {sums["naive ring"] for sums in by_rank}
    assert naive == ({0.0, 1.0} if len(ran) > 2 else {1e8})
    for name in ("gather + broadcast", "chunked ring"):
        assert len({sums[name] for sums in by_rank}) == 1


def sums_of_gloo_and_of_rings(device) -> list[torch.Tensor]:
    """Sum a tensor with gloo, in a ring to the left, and in our ring, which sends to the right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = (torch.float32, [100 * ranks], "contiguous", False, 7)
    of_gloo, right = make(case, rank, device), make(case, rank, device)
    dist.all_reduce(of_gloo)
    ring.all_reduce_chunked_ring(right, Wire())
    chunks = [ring.split(make(case, other, "cpu"), ranks) for other in range(ranks)]
    left = []
    for number in range(ranks):  # chunk r starts on rank r − 1, and its sum is complete on rank r
        total = torch.zeros(100)
        for distance in range(1, ranks + 1):
            total += chunks[(number - distance) % ranks][number]
        left.append(total)
    return [of_gloo.cpu(), torch.cat(left), right.cpu()]


def test_the_all_reduce_of_gloo_adds_as_a_chunked_ring_to_the_left(ran):
    for *_, (of_gloo, left, right), _ in ran:
        assert torch.equal(of_gloo, left)
        # On three ranks, the two directions differ only in the order of the first two numbers.
        assert torch.equal(of_gloo, right) == (len(ran) < 4)


def test_the_result_is_written_in_place_for_every_memory_layout(ran):
    for ranks in by_case(ran):
        assert all(rank.is_in_place for rank in ranks)
    assert {rank.case[2] for ranks in by_case(ran) for rank in ranks} > {"transposed"}


def test_each_rank_sends_and_receives_the_bytes_of_the_formula(ran):
    for ranks in by_case(ran):
        name, case, tensor = ranks[0].name, ranks[0].case, ranks[0].tensor
        sizes = traffic.chunk_sizes(tensor.numel(), tensor.element_size(), len(ranks))
        for rank in range(len(ranks)):
            expected = traffic.FORMULAS[name][0](rank, sizes)
            counted = traffic.bytes_sent_and_received(messages_of(ranks), rank)
            assert counted == expected, (name, case)


def test_each_algorithm_has_the_expected_steps_and_rings_send_only_to_the_right(ran):
    count = len(ran)
    for ranks in by_case(ran):
        name, log = ranks[0].name, messages_of(ranks)
        assert {message.step for message in log} == set(range(1, STEPS[name](count) + 1))
        if name != "gather + broadcast":
            assert all(message.target == (message.source + 1) % count for message in log)
            assert len(log) == STEPS[name](count) * count  # every rank sends in each step
        else:
            assert len(log) == STEPS[name](count)  # one message per step, to or from rank 0
            assert all(0 in (message.source, message.target) for message in log)


def test_every_rank_has_one_complete_chunk_halfway_and_all_chunks_at_the_end(ran):
    count = len(ran)
    for ranks in by_case(ran):
        if ranks[0].name == "chunked ring":
            states = traffic.holdings(messages_of(ranks), count)
            half = states[count - 1]  # after the reduce-scatter
            assert all(half[rank][rank] == set(range(count)) for rank in range(count))
            assert states[-1] == [[set(range(count))] * count] * count


def test_wrong_input_is_one_value_error_on_all_ranks_before_any_message(ran):
    by_rank = [messages for _, messages, *_ in ran]
    assert all(messages == by_rank[0] for messages in by_rank)
    named = ["tensor must not require grad", "mean must be False"]
    named += [*["tensor must hold real numbers"] * 2, *["tensor must be a torch.Tensor"] * 2]
    alone = ["", "", ""]  # with one rank, these inputs are valid
    unlike = ["tensor must match tensor", "tensor must match tensor", "rank 0 calls"]
    expected = [*named, *(alone if len(ran) == 1 else unlike)] * 3
    expected.append("" if len(ran) == 1 else "rank 0 calls all_reduce_chunked_ring")
    assert len(by_rank[0]) == len(expected)
    for sentence, start in zip(by_rank[0], expected, strict=True):
        assert sentence.startswith(start) and bool(sentence) == bool(start), sentence


@settings(derandomize=True, database=None)
@given(st.integers(1, 70), st.integers(0, 1000), st.sampled_from([1, 2, 4, 8]))
def test_chunked_ring_and_gather_broadcast_send_equal_bytes_in_total(ranks, length, element_size):
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
        # In each phase, a rank sends all chunks but one. That chunk's size differs from the mean
        # size by less than one element.
        assert abs(sent * ranks - 2 * (ranks - 1) * size) < 2 * element_size * ranks


def test_a_rank_of_the_chunked_ring_sends_less_than_two_tensors_for_any_number_of_ranks():
    for ranks in range(1, 2000):
        sizes = [3] * ranks
        assert traffic.chunked_ring_bytes(0, sizes)[0] < 2 * sum(sizes)
        assert traffic.naive_ring_bytes(0, sizes)[0] == (ranks - 1) * sum(sizes)


def test_the_program_prints_or_draws_the_steps_and_prints_the_bytes(ran, picture):
    ranks, (text, beside_picture) = len(ran), ran[0][4]
    steps = [row for row in table_rows(text) if row[0].isdigit()]
    phases = [*["reduce-scatter"] * (ranks - 1), *["all-gather"] * (ranks - 1)]
    assert [row[1] for row in steps] == phases
    assert [row[0] for row in steps] == [str(step) for step in range(1, 2 * ranks - 1)]
    if ranks == 3:
        chunks = [row[2:] for row in steps]
        assert chunks[:2] == [["chunk 2", "chunk 0", "chunk 1"], ["chunk 1", "chunk 2", "chunk 0"]]
        assert chunks[2:] == [["chunk 0", "chunk 1", "chunk 2"], ["chunk 2", "chunk 0", "chunk 1"]]
        guess = "Your guess: 8,000 bytes. The result: 5,332 bytes. Your guess is too high by 2,668"
        assert text.endswith(f"\n{guess} bytes.\n")
        assert [row[-2] for row in table_rows(text)][-1] == traffic.UNEVEN  # 1000 elements
    assert text.count("to the byte") == 3 and "NO" not in text
    assert "3 of 3 have the same result as dist.all_reduce." in text
    assert beside_picture == text[text.index("Bytes that each rank sends") :]
    assert all(texts == ["", ""] for *_, texts in ran[1:])
    assert "at the end" in words_in(picture)
    assert ("step 1" in words_in(picture)) == (ranks > 1)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_the_sums_and_bytes_are_correct_on_gpus(together):
    ran = together(every_case, 2, environment=VISIBLE_GPUS)
    test_sums_agree_with_those_of_the_library(ran)
    test_each_rank_sends_and_receives_the_bytes_of_the_formula(ran)
    test_wrong_input_is_one_value_error_on_all_ranks_before_any_message(ran)

"""All methods return the same distance and gradient, and reject invalid arguments."""

import inspect
import random
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from kernel_distance import methods
from kernel_distance.methods import (
    METHODS,
    chunked,
    closed_form,
    double_loop,
    graph_bytes,
    over_devices,
    over_ranks,
    predicted_graph_bytes,
    reference,
    vectorized,
)
from torch.nn.parallel import DistributedDataParallel

from tests.anatomy.programs import table_rows
from tests.conftest import GPUS, VISIBLE_GPUS
from tests.pages.pages import TUTORIALS

IN_ONE_PROCESS = [double_loop, vectorized, chunked, over_devices, closed_form]


def on_two(weight, p=1, signed=False):
    return over_devices(weight, p, signed, devices=["cpu", "cpu"])


def in_small_parts(weight, p=1, signed=False):
    return chunked(weight, p, signed, rows_at_once=1)


def examples(seed: int, count: int):
    """Yield weights of many shapes, some with equal values or equal kernels."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for number in range(count):
        shape = [draw.randint(1, 7) for _ in range(draw.choice([2, 3, 4, 5]))]
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        if number % 3 == 1:
            weight = weight.round()
        if number % 3 == 2:
            weight[0] = weight[-1]
        if number % 4 == 3 and len(shape) == 4:
            weight = weight.contiguous(memory_format=torch.channels_last)
        yield weight


def number_and_gradient(method, weight, p):
    leaf = weight.detach().clone().requires_grad_()
    number = method(leaf, p)
    assert number.shape == () and number.requires_grad
    (3 * number).backward()
    return number.detach(), leaf.grad / 3


def is_close(value, expected, tolerance=1e-9) -> bool:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    largest = max(1, float(expected.abs().max()))
    return bool((value - expected).abs().max() <= tolerance * largest)


@pytest.mark.parametrize("p", [1, 2])
def test_every_method_agrees_with_the_double_loop_and_the_formula(p):
    for weight in (*examples(p, 40), torch.zeros(4, 2, 3, 3).double(), torch.ones(1, 2).double()):
        number, gradient = number_and_gradient(double_loop, weight, p)
        by_formula = reference(weight, p)
        assert is_close(number, by_formula[0]) and is_close(gradient, by_formula[1])
        for method in (vectorized, chunked, in_small_parts, over_devices, on_two, closed_form):
            if method is closed_form and p == 2:
                continue
            result = number_and_gradient(method, weight, p)
            assert is_close(result[0], number) and is_close(result[1], gradient), (method, weight)


def test_the_gradient_between_equal_kernels_is_zero_in_every_method():
    equal_kernels = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 5.0]])
    for method in (*IN_ONE_PROCESS, on_two):
        gradient = number_and_gradient(method, equal_kernels, 1)[1]
        assert gradient.tolist() == [[2, -2], [2, -2], [-4, 4]], method
        zeros = number_and_gradient(method, torch.zeros(5, 3, 3, 3), 1)
        assert zeros[0] == 0 and not zeros[1].any()
        if method is not closed_form:
            gradient = number_and_gradient(method, equal_kernels, 2)[1]
            assert is_close(gradient[0], gradient[1]) and gradient.isfinite().all()
            zeros = number_and_gradient(method, torch.zeros(5, 3, 3, 3), 2)
            assert zeros[0] == 0 and not zeros[1].any()


def test_the_sum_counts_every_pair_twice_like_cdist():
    weight = torch.tensor([[0.0], [1.0], [3.0]])
    assert double_loop(weight) == 2 * (1 + 3 + 2)
    for weight in examples(9, 12):
        for p in (1, 2):
            kernels = weight.flatten(1)
            # With a matrix product, rounding makes the distance of a kernel to itself nonzero.
            exact = {"p": p, "compute_mode": "donot_use_mm_for_euclid_dist"}
            by_library = number_and_gradient(
                lambda leaf, p, exact=exact: torch.cdist(leaf, leaf, **exact).sum(), kernels, p
            )
            by_loop = number_and_gradient(double_loop, kernels, p)
            assert all(map(is_close, by_library, by_loop))


@pytest.mark.parametrize("offset", [10, 100, 1000])
def test_the_closed_form_stays_accurate_if_all_kernels_are_far_from_zero(offset):
    noise = torch.randn(64, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    weight = offset + 0.01 * noise
    value, gradient = reference(weight, 1)
    number, result = number_and_gradient(closed_form, weight, 1)
    assert abs(number.item() / value - 1) < 2e-6
    assert torch.equal(result.double(), gradient)


def test_signed_differences_cancel_and_are_rejected():
    weight = torch.randint(-9, 9, (6, 2, 3, 3)).double().requires_grad_()
    kernels = weight.flatten(1)
    total = (kernels[:, None] - kernels).sum()
    total.backward()
    assert total == 0 and not weight.grad.any()
    for method in IN_ONE_PROCESS:
        with pytest.raises(ValueError, match="^signed must be False: .*cancel"):
            method(weight, signed=True)


BAD = [  # (keyword arguments, start of the error message)
    ({"weight": torch.nn.Conv2d(1, 2, 3)}, "weight must be a tensor, got Conv2d"),
    ({"weight": torch.ones(3, 2, dtype=torch.int64)}, "weight must be of a floating-point dtype"),
    ({"weight": torch.ones(3, 2, dtype=torch.complex64)}, "weight must be of a floating-point"),
    ({"weight": torch.ones(0, 2, 3, 3)}, "weight must have at least one kernel"),
    ({"weight": torch.ones(2, 0, 3, 3)}, "weight must have at least one kernel"),
    ({"weight": torch.ones(5)}, "weight must have at least one kernel"),
    ({"weight": torch.ones(3, 2).to_sparse()}, "weight must be dense, got torch.sparse_coo"),
    ({"p": 3}, "p must be 1 "),
    ({"p": 0}, "p must be 1 "),
    ({"p": "signed"}, "p must be 1 "),
    ({"p": float("inf")}, "p must be 1 "),
    ({"p": None}, "p must be 1 "),
    ({"p": True}, "p must be 1 "),
]
BAD_PARTS = [
    ({"rows_at_once": wrong}, "rows_at_once must be an integer") for wrong in (0, -1, 1.5, True)
]


def test_an_invalid_argument_raises_a_value_error_that_names_it():
    for method in IN_ONE_PROCESS:
        for arguments, message in BAD + (BAD_PARTS if method in (chunked, over_devices) else []):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                method(**{"weight": torch.ones(3, 2), **arguments})
    with pytest.raises(ValueError, match="^p must be 1 in closed_form"):
        closed_form(torch.ones(3, 2), p=2)
    with pytest.raises(ValueError, match="^over_ranks needs a process group"):
        over_ranks(torch.ones(3, 2))


def test_frozen_and_half_precision_weights_are_supported():
    weight = torch.randn(5, 2, 3, 3)
    for method in (*IN_ONE_PROCESS, on_two, in_small_parts):
        distance = method(weight)
        assert not distance.requires_grad and is_close(distance, double_loop(weight), 1e-5)
        for dtype in (torch.float16, torch.bfloat16):
            many = (100 * weight).to(dtype).repeat(9, 1, 1, 1)
            number, gradient = number_and_gradient(method, many, 1)
            value, expected = reference(many, 1)
            assert number.dtype == torch.float32 and gradient.dtype == dtype
            assert is_close(number, value, 1e-4) and value > 65504
            assert is_close(gradient, expected.to(dtype), 1e-2)


def test_the_closed_form_handles_512_kernels_with_little_time_and_memory():
    weight = torch.randn(512, 512, 3, 3, requires_grad=True)
    assert graph_bytes(closed_form, weight) == weight.nbytes
    number = closed_form(weight)
    number.backward()
    kernels = weight.detach().double().flatten(1)
    rows = [0, 100, 511]  # all rows of the reference would take too long
    expected = torch.stack([2 * (kernels[row] - kernels).sign().sum(0) for row in rows])
    assert torch.equal(weight.grad.flatten(1)[rows].double(), expected)
    by_euler = (weight.grad.double() * weight.detach()).sum()
    assert is_close(number, by_euler, 1e-5)


def test_the_graph_stores_as_many_bytes_as_predicted():
    for shape in ((6, 4, 3, 3), (12, 4, 3, 3), (9, 1, 5, 5)):
        weight = torch.randn(shape, requires_grad=True)
        for name, method in METHODS.items():
            if "ranks" not in name:
                predicted = predicted_graph_bytes(name, shape, 1)
                assert graph_bytes(method, weight) == predicted, (name, shape)
    assert predicted_graph_bytes("double loop", (512, 512, 3, 3), 1) > 4.8e9


def in_ranks():
    """Run all checks that need a process group; return a list of the failures."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []

    def check(name, method, weight, p):
        number, gradient = number_and_gradient(method, weight, p)
        expected = number_and_gradient(double_loop, weight, p)
        if not (is_close(number, expected[0]) and is_close(gradient, expected[1])):
            wrong.append((name, tuple(weight.shape), p))

    for weight in examples(4, 24):
        for p in (1, 2):
            check("over ranks", over_ranks, weight, p)
            check("chunked", METHODS["over ranks, chunked"], weight, p)
    weight = torch.randn(7, 2, 3, 3, generator=torch.Generator().manual_seed(1)).double()

    kept = graph_bytes(over_ranks, weight.float().requires_grad_())
    rows = len(torch.arange(7).tensor_split(ranks)[rank])
    if kept != rows * predicted_graph_bytes("vectorized", weight.shape, 1) // 7:
        wrong.append(("kept", kept))
    wrong += [] if not over_ranks(weight).requires_grad else ["needs no gradient"]

    # The distance adds the same gradient on every rank, so DDP's average does not change it. The
    # images add a different gradient on each rank.
    for method in (over_ranks, vectorized):
        layer = torch.nn.Conv2d(2, 7, 3, bias=False).double()
        layer.weight.data.copy_(weight)
        model = DistributedDataParallel(layer)
        images = torch.full((1, 2, 3, 3), float(rank + 1)).double()
        (model(images).sum() + method(layer.weight)).backward()
        mean = (ranks + 1) / 2
        gradient = number_and_gradient(double_loop, weight, 1)[1] + mean
        wrong += [] if is_close(layer.weight.grad, gradient) else [f"DDP, {method.__name__}"]
        kept = graph_bytes(method, layer.weight)  # only over_ranks splits the graph among the ranks
        expected = rows if method is over_ranks else 7
        wrong += [] if kept // layer.weight.nbytes == expected else [f"DDP keeps {kept}"]
    return wrong


def warnings_of_a_plain_all_reduce() -> list[str]:
    """Return the warnings during backward through `dist.all_reduce`, which page 93 quotes."""
    total = torch.ones(3, requires_grad=True).sum()
    dist.all_reduce(total)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total.backward()
    return [str(warning.message) for warning in caught]


def messages_of_mistakes():
    """Return two error messages for each mistake: if only rank 1 makes it, and if all ranks do."""
    rank, messages = dist.get_rank(), []
    fine = {"weight": torch.ones(3, 2)}
    on_one = [  # a different shape, dtype, p or requires_grad than on other ranks
        {"weight": torch.ones(4, 2)},
        {"weight": torch.ones(3, 2).double()},
        {"weight": torch.ones(3, 2), "p": 2},
        {"weight": torch.ones(3, 2, requires_grad=True)},
    ]
    for wrong, _ in BAD + BAD_PARTS:
        on_one.append({**fine, **wrong})
    on_one.append({**fine, "signed": True})
    for wrong in on_one:
        for ranks in ([1], range(dist.get_world_size())):
            try:
                over_ranks(**(wrong if rank in ranks else fine))
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
    return messages


def check_all():
    return in_ranks(), warnings_of_a_plain_all_reduce(), messages_of_mistakes()


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_over_ranks_every_rank_has_the_whole_gradient_and_no_mistake_hangs(together, processes):
    results = together(check_all, processes)
    for wrong, warned, messages in results:
        assert wrong == []
        assert any("silently incorrect" in text for text in warned)
        on_one, on_all = messages[::2], messages[1::2]
        alike = "weight and p must match on all ranks; "
        assert all(alike in message for message in on_one[:4])
        assert on_all[:4] == [""] * 4
        beginnings = [message for _, message in BAD + BAD_PARTS] + ["signed must be False"]
        for one_rank, all_ranks, beginning in zip(on_one[4:], on_all[4:], beginnings, strict=True):
            assert one_rank.startswith(f"on rank 1: {beginning}")
            assert all_ranks.startswith(f"on rank 0: {beginning}")


def test_the_program_measures_every_method(start):
    result = start("python tutorials/kernel_distance --layers 6x2".split(), timeout=200)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [row for row in table_rows(result.stdout) if row[0] in METHODS]
    for_lengths = [method for method in METHODS if method != "closed form"]
    assert [row[0] for row in rows] == [*METHODS, *for_lengths]
    assert all(float(row[3]) < 1e-5 and float(row[1]) > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_the_rows_are_split_among_two_gpus(start):
    program = (
        "import torch\n"
        "from kernel_distance.methods import double_loop, over_devices\n"
        "weight = torch.randn(9, 4, 3, 3, device='cuda:0', dtype=torch.double).requires_grad_()\n"
        "numbers = [method(weight) for method in (double_loop, over_devices)]\n"
        "first, second = [torch.autograd.grad(number, weight)[0] for number in numbers]\n"
        "assert torch.allclose(*numbers, rtol=1e-9) and torch.allclose(first, second, rtol=1e-9)\n"
        "assert torch.cuda.max_memory_allocated(1) > 0\n"
    )
    result = start(["python", "-c", program], cwd=TUTORIALS, **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr


def test_all_methods_have_the_same_signature():
    functions = (*IN_ONE_PROCESS, over_ranks)
    members = [member for _, member in inspect.getmembers(methods, inspect.isfunction)]
    names = {member.__name__ for member in members if member.__module__ == methods.__name__}
    public = {name for name in names if not name.startswith("_")}
    public -= {"graph_bytes", "predicted_graph_bytes", "reference"}
    assert public == {function.__name__ for function in functions}
    for function in functions:
        parameters = list(inspect.signature(function).parameters.values())
        assert [parameter.name for parameter in parameters[:3]] == ["weight", "p", "signed"]
        assert all(parameter.default is not parameter.empty for parameter in parameters[1:])

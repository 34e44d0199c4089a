"""Every way gives the double loop's number and gradient; what cannot be asked is one ValueError."""

import random
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.kernel_distance import methods
from accel_demo.anatomy.kernel_distance.costs import WAYS, bytes_kept, bytes_to_keep, reference
from accel_demo.anatomy.kernel_distance.methods import (
    chunked,
    closed_form,
    double_loop,
    over_devices,
    over_ranks,
    vectorised,
)
from tests.conftest import GPUS

IN_ONE_PROCESS = [double_loop, vectorised, chunked, over_devices, closed_form]


def on_two(weight, p=1, signed=False):
    return over_devices(weight, p, signed, devices=["cpu", "cpu"])


def in_small_parts(weight, p=1, signed=False):
    return chunked(weight, p, signed, rows_at_once=1)


def examples(seed: int, count: int):
    """Weights of many shapes; in a third of them some values, or whole kernels, are the same."""
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


def number_and_gradient(way, weight, p):
    leaf = weight.detach().clone().requires_grad_()
    number = way(leaf, p)
    assert number.shape == () and number.requires_grad
    (3 * number).backward()
    return number.detach(), leaf.grad / 3


def is_close(one, other, tolerance=1e-9) -> bool:
    other = torch.as_tensor(other, dtype=torch.float64)
    return bool((one - other).abs().max() <= tolerance * max(1, float(other.abs().max())))


@pytest.mark.parametrize("p", [1, 2])
def test_every_way_is_the_double_loop_and_the_formula(p):
    for weight in (*examples(p, 40), torch.zeros(4, 2, 3, 3).double(), torch.ones(1, 2).double()):
        number, gradient = number_and_gradient(double_loop, weight, p)
        by_formula = reference(weight, p)
        assert is_close(number, by_formula[0]) and is_close(gradient, by_formula[1])
        for way in (vectorised, chunked, in_small_parts, over_devices, on_two, closed_form):
            if way is closed_form and p == 2:
                continue
            mine = number_and_gradient(way, weight, p)
            assert is_close(mine[0], number) and is_close(mine[1], gradient), (way, weight)


def test_the_gradient_between_equal_kernels_is_zero_as_it_is_in_the_loop():
    twins = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 5.0]])
    for way in (*IN_ONE_PROCESS, on_two):
        gradient = number_and_gradient(way, twins, 1)[1]
        assert gradient.tolist() == [[2, -2], [2, -2], [-4, 4]], way
        zeros = number_and_gradient(way, torch.zeros(5, 3, 3, 3), 1)
        assert zeros[0] == 0 and not zeros[1].any()
        if way is not closed_form:
            gradient = number_and_gradient(way, twins, 2)[1]
            assert is_close(gradient[0], gradient[1]) and gradient.isfinite().all()
            zeros = number_and_gradient(way, torch.zeros(5, 3, 3, 3), 2)
            assert zeros[0] == 0 and not zeros[1].any()


def test_the_sum_counts_every_pair_twice_and_cdist_does_too():
    weight = torch.tensor([[0.0], [1.0], [3.0]])
    assert double_loop(weight) == 2 * (1 + 3 + 2)
    for weight in examples(9, 12):
        for p in (1, 2):
            kernels = weight.flatten(1)
            # a matrix product would round, so that a kernel is not at 0 from itself
            exact = {"p": p, "compute_mode": "donot_use_mm_for_euclid_dist"}
            by_library = number_and_gradient(
                lambda leaf, p, exact=exact: torch.cdist(leaf, leaf, **exact).sum(), kernels, p
            )
            by_loop = number_and_gradient(double_loop, kernels, p)
            assert all(map(is_close, by_library, by_loop))


@pytest.mark.parametrize("offset", [10, 100, 1000])
def test_the_closed_form_keeps_its_digits_where_all_kernels_are_far_from_zero(offset):
    noise = torch.randn(64, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    weight = offset + 0.01 * noise
    value, gradient = reference(weight, 1)
    number, mine = number_and_gradient(closed_form, weight, 1)
    assert abs(number.item() / value - 1) < 2e-6
    assert torch.equal(mine.double(), gradient)


def test_signed_differences_cancel_and_are_refused():
    weight = torch.randint(-9, 9, (6, 2, 3, 3)).double().requires_grad_()
    kernels = weight.flatten(1)
    total = (kernels[:, None] - kernels).sum()
    total.backward()
    assert total == 0 and not weight.grad.any()
    for way in IN_ONE_PROCESS:
        with pytest.raises(ValueError, match="^signed must be False: .*cancel"):
            way(weight, signed=True)


BAD = [  # (keyword arguments, the beginning of what is said)
    ({"weight": torch.nn.Conv2d(1, 2, 3)}, "weight must be a tensor, got Conv2d"),
    ({"weight": torch.ones(3, 2, dtype=torch.int64)}, "weight must be of a floating-point dtype"),
    ({"weight": torch.ones(3, 2, dtype=torch.complex64)}, "weight must be of a floating-point"),
    ({"weight": torch.ones(0, 2, 3, 3)}, "weight must have one kernel or more"),
    ({"weight": torch.ones(2, 0, 3, 3)}, "weight must have one kernel or more"),
    ({"weight": torch.ones(5)}, "weight must have one kernel or more"),
    ({"weight": torch.ones(3, 2).to_sparse()}, "weight must be dense, got torch.sparse_coo"),
    ({"p": 3}, "p must be 1 "),
    ({"p": 0}, "p must be 1 "),
    ({"p": "signed"}, "p must be 1 "),
    ({"p": float("inf")}, "p must be 1 "),
    ({"p": None}, "p must be 1 "),
    ({"p": True}, "p must be 1 "),
]
BAD_PARTS = [
    ({"rows_at_once": wrong}, "rows_at_once must be a whole number") for wrong in (0, -1, 1.5, True)
]
BAD_DEVICES = [
    ({"devices": []}, "devices must be a list of one device or more"),
    ({"devices": "cpu"}, "devices must be a list of one device or more"),
    ({"devices": ["cpu", "cuda:0"]}, "devices: 'cuda:0' cannot be used here"),
    ({"devices": ["nowhere"]}, "devices: 'nowhere' cannot be used here"),
    ({"devices": ["meta"]}, "devices: 'meta' cannot be used here"),
    ({"devices": [None, object()]}, "devices: <object"),
]


def test_what_cannot_be_computed_is_one_value_error_that_names_the_argument():
    for way in IN_ONE_PROCESS:
        wrong = BAD + (BAD_PARTS if way in (chunked, over_devices) else [])
        for arguments, said in wrong + (BAD_DEVICES if way is over_devices else []):
            with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
                way(**{"weight": torch.ones(3, 2), **arguments})
    with pytest.raises(ValueError, match="^p must be 1 in closed_form"):
        closed_form(torch.ones(3, 2), p=2)
    with pytest.raises(ValueError, match="^over_ranks needs a process group"):
        over_ranks(torch.ones(3, 2))


def test_a_weight_may_need_no_gradient_or_be_of_half_precision():
    weight = torch.randn(5, 2, 3, 3)
    for way in (*IN_ONE_PROCESS, on_two, in_small_parts):
        assert not way(weight).requires_grad and is_close(way(weight), double_loop(weight), 1e-5)
        for dtype in (torch.float16, torch.bfloat16):
            many = (100 * weight).to(dtype).repeat(9, 1, 1, 1)
            number, gradient = number_and_gradient(way, many, 1)
            value, expected = reference(many, 1)
            assert number.dtype == torch.float32 and gradient.dtype == dtype
            assert is_close(number, value, 1e-4) and value > 65504
            assert is_close(gradient, expected.to(dtype), 1e-2)


def test_a_layer_of_512_kernels_takes_the_closed_form_little_time_and_memory():
    weight = torch.randn(512, 512, 3, 3, requires_grad=True)
    assert bytes_kept(closed_form, weight) == weight.nbytes
    number = closed_form(weight)
    number.backward()
    kernels = weight.detach().double().flatten(1)
    some = [0, 100, 511]  # rows of the reference: all of them would take longer than this test may
    expected = torch.stack([2 * (kernels[row] - kernels).sign().sum(0) for row in some])
    assert torch.equal(weight.grad.flatten(1)[some].double(), expected)
    by_euler = (weight.grad.double() * weight.detach()).sum()
    assert is_close(number, by_euler, 1e-5)


def test_a_graph_keeps_what_the_law_says():
    for shape in ((6, 4, 3, 3), (12, 4, 3, 3), (9, 1, 5, 5)):
        weight = torch.randn(shape, requires_grad=True)
        for name, way in WAYS.items():
            if "ranks" not in name and name != "torch.cdist":
                assert bytes_kept(way, weight) == bytes_to_keep(name, shape, 1), (name, shape)
        assert bytes_kept(WAYS["torch.cdist"], weight) == bytes_to_keep("torch.cdist", shape, 1)
    assert bytes_to_keep("double loop", (512, 512, 3, 3), 1) > 4.8e9


def in_ranks():
    """Everything that needs a group, in one launch: what was wrong."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []

    def check(name, way, weight, p, factor=1.0):
        mine, expected = number_and_gradient(way, weight, p), number_and_gradient(*loop, weight, p)
        if not (is_close(mine[0], expected[0]) and is_close(mine[1], factor * expected[1])):
            wrong.append((name, tuple(weight.shape), p))

    loop = (double_loop,)
    for weight in examples(4, 24):
        for p in (1, 2):
            check("over ranks", over_ranks, weight, p)
            check("chunked", WAYS["over ranks, chunked"], weight, p)
    weight = torch.randn(7, 2, 3, 3, generator=torch.Generator().manual_seed(1)).double()

    kept = bytes_kept(over_ranks, weight.float().requires_grad_())
    rows = len(torch.arange(7).tensor_split(ranks)[rank])
    if kept != rows * bytes_to_keep("vectorised", weight.shape, 1) // 7:
        wrong.append(("kept", kept))
    wrong += [] if not over_ranks(weight).requires_grad else ["needs no gradient"]

    # Under DDP: the mean of equal gradients, beside the gradient of the data
    for way in (over_ranks, vectorised):
        layer = torch.nn.Conv2d(2, 7, 3, bias=False).double()
        layer.weight.data.copy_(weight)
        model = DistributedDataParallel(layer)
        images = torch.full((1, 2, 3, 3), float(rank + 1)).double()
        (model(images).sum() + way(layer.weight)).backward()
        mean = (ranks + 1) / 2
        gradient = number_and_gradient(double_loop, weight, 1)[1] + mean
        wrong += [] if is_close(layer.weight.grad, gradient) else [f"DDP, {way.__name__}"]
        kept = bytes_kept(way, layer.weight)  # DDP does not split it; over_ranks does
        expected = rows if way is over_ranks else 7
        wrong += [] if kept // layer.weight.nbytes == expected else [f"DDP keeps {kept}"]
    return wrong


def other_sums():
    """Plain and autograd-aware all-reduce of the ranks' shares: the gradient each rank gets."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()

    def share(kernels):
        return (kernels.tensor_split(ranks)[rank][:, None] - kernels).abs().sum()

    def plain(kernels, p):
        total = share(kernels)
        dist.all_reduce(total)
        return total

    own = number_and_gradient(lambda kernels, p: share(kernels), weight, 1)[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_plain = number_and_gradient(plain, weight, 1)
    aware = number_and_gradient(
        lambda kernels, p: all_reduce(share(kernels), "sum", dist.group.WORLD), weight, 1
    )
    mean = aware[1].clone()
    dist.all_reduce(mean)
    whole = number_and_gradient(vectorised, weight, 1)
    return {
        "plain number": is_close(by_plain[0], whole[0]),
        "plain has its share alone": is_close(by_plain[1], own),
        "warned": any("silently incorrect" in str(warning.message) for warning in caught),
        "aware number": is_close(aware[0], whole[0]),
        "aware has N times its share": is_close(aware[1], ranks * own),
        "aware, mean": is_close(mean / ranks, whole[1]),
        "a share is not the whole": not is_close(own, whole[1], 0.1),
    }


def mistakes():
    """What each rank is told where all of them, or one alone, make a mistake."""
    rank, told = dist.get_rank(), []
    fine = {"weight": torch.ones(3, 2)}
    on_one = [  # another shape, dtype, p, or need of a gradient than the others
        {"weight": torch.ones(4, 2)},
        {"weight": torch.ones(3, 2).double()},
        {"weight": torch.ones(3, 2), "p": 2},
        {"weight": torch.ones(3, 2, requires_grad=True)},
    ]
    for wrong, _ in BAD + BAD_PARTS:
        on_one.append({**fine, **wrong})
    on_one.append({**fine, "signed": True})
    for wrong in on_one:
        for who in ([1], range(dist.get_world_size())):
            try:
                over_ranks(**(wrong if rank in who else fine))
                told.append("")
            except ValueError as error:
                told.append(str(error))
    return told


def all_of_it():
    return in_ranks(), other_sums(), mistakes()


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_over_ranks_every_rank_has_the_whole_gradient_and_no_mistake_hangs(together, processes):
    results = together(all_of_it, processes)
    for wrong, sums, told in results:
        assert wrong == []
        assert all(sums.values()), sums
        on_one, on_all = told[::2], told[1::2]
        assert all("weight and p must be alike on every rank; " in said for said in on_one[:4])
        assert on_all[:4] == [""] * 4
        beginnings = [said for _, said in BAD + BAD_PARTS] + ["signed must be False"]
        for alone, together_, beginning in zip(on_one[4:], on_all[4:], beginnings, strict=True):
            assert alone.startswith(f"on rank 1: {beginning}")
            assert together_.startswith(f"on rank 0: {beginning}")


def test_the_program_measures_every_way(start, tmp_path):
    picture = tmp_path / "memory.svg"
    command = "python -m accel_demo.anatomy.kernel_distance --layers 6x2 --plot".split()
    result = start([*command, picture], timeout=200)
    assert (result.returncode, result.stderr) == (0, "")
    rows = re.findall(r"^\| (\S[^|]*?) +\| +(\S+) +\| +(\S+) +\| +(\S+) +\|$", result.stdout, re.M)
    rows = [row for row in rows if row[0] in WAYS]
    assert [row[0] for row in rows] == [*WAYS, *[way for way in WAYS if way != "closed form"]]
    assert all(float(row[3]) < 1e-5 and float(row[1]) > 0 for row in rows)
    assert "peak memory in MB" in picture.read_text()
    assert picture.read_text().count("there is none for p=2") == 1  # the closed form


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "big"], "--layers takes NxC"),
        (["--layers", "0x4"], "--layers takes NxC"),
        (["--layers", "4x513"], "--layers takes NxC"),
        (["--processes", "0"], "--processes must be at least 1"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(monkeypatch, capsys, arguments, said):
    from accel_demo.anatomy.kernel_distance.costs import main

    monkeypatch.setattr("sys.argv", ["kernel_distance", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.fullmatch(f"error: {said}.*\n", capsys.readouterr().err)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_two_gpus_share_the_rows(start):
    program = (
        "import torch\n"
        "from accel_demo.anatomy.kernel_distance.methods import double_loop, over_devices\n"
        "weight = torch.randn(9, 4, 3, 3, device='cuda:0', dtype=torch.double).requires_grad_()\n"
        "numbers = [way(weight) for way in (double_loop, over_devices)]\n"
        "one, other = [torch.autograd.grad(number, weight)[0] for number in numbers]\n"
        "assert torch.allclose(*numbers, rtol=1e-9) and torch.allclose(one, other, rtol=1e-9)\n"
        "assert torch.cuda.max_memory_allocated(1) > 0\n"
    )
    from tests.conftest import VISIBLE_GPUS

    result = start(["python", "-c", program], **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr


def test_all_ways_have_one_signature():
    import inspect

    ways = (*IN_ONE_PROCESS, over_ranks)
    functions = {name for name, _ in inspect.getmembers(methods, inspect.isfunction)}
    public = {name for name in functions if not name.startswith("_")}
    assert public - {"checkpoint", "once_differentiable"} == {way.__name__ for way in ways}
    for way in ways:
        parameters = list(inspect.signature(way).parameters.values())
        assert [one.name for one in parameters[:3]] == ["weight", "p", "signed"]
        assert all(one.default is not one.empty for one in parameters[1:])

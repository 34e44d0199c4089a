"""4 × 8 is 32 only where losses are divided, gradients shared and steps taken at the right time."""

import random

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy import accumulation
from accel_demo.anatomy.accumulation import EQUAL, FULL, ONE, SHORT, TOKENS, Seen
from accel_demo.processes.connect import use_cpu

RIGHT = {  # (samples, way): all-reduces, optimizer steps
    (ONE, "one batch"): (1, 1),
    (FULL, "DDP, `no_sync` before the last"): (1, 1),
    (FULL, "DDP, without `no_sync`"): (4, 1),
    (FULL, "`accumulate`"): (1, 1),
    (FULL, "clip where `sync_gradients`"): (1, 1),
    (SHORT, "loss × 4 / true length"): (2, 2),
    (TOKENS, "sum / tokens of all processes"): (1, 1),
}
WRONG = {  # the gradients of its steps
    (FULL, "DDP, loss not divided by 4"): ["×4"],
    (FULL, "`accumulate`, but `loss.backward()`"): ["×4"],
    (FULL, "`accumulate`, optimizer not prepared"): ["another on each rank"] * 3 + ["off"],
    (FULL, "clip after every backward"): ["off"],
    (SHORT, "`accumulate` alone"): [EQUAL, "×0.5"],
    (TOKENS, "mean of each micro-batch"): ["off"],
}


def observe_all() -> tuple[list[Seen], list[str]]:
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=accumulation.WINDOW)
    seen = [accumulation.observe(accelerator, *way) for way in accumulation.WAYS]
    return seen, any_window()


def any_window() -> list[str]:
    """What `compare` says of windows of many lengths and batches, accumulated by hand."""
    draw, said = random.Random(0), []
    world_size = dist.get_world_size()
    for _ in range(8):
        window, batch, width = draw.randint(1, 6), draw.randint(1, 5), draw.randint(1, 9)
        torch.manual_seed(draw.randrange(10**6))
        model = DistributedDataParallel(torch.nn.Linear(width, 1))
        inputs = torch.randn(window, world_size, batch, width)
        targets = torch.randn(window, world_size, batch, 1)
        optimizer, used = torch.optim.SGD(model.parameters(), lr=0.0), []
        optimizer.register_step_pre_hook(
            lambda *_, model=model, used=used: used.append(
                torch.cat([weight.grad.flatten() for weight in model.parameters()])
            )
        )
        mine = zip(inputs[:, dist.get_rank()], targets[:, dist.get_rank()], strict=True)
        accumulation.by_hand(None, model, optimizer, mine, window=window)
        everything = inputs.flatten(0, 2), targets.flatten(0, 2)
        right = accumulation.right_gradient(model.module, everything, torch.device("cpu"))
        gathered = [torch.empty_like(used[0]) for _ in range(world_size)]
        dist.all_gather(gathered, used[0])
        said += [accumulation.compare(torch.stack(gathered), right), len(used)]
    return said


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_way_shares_steps_and_errs_as_it_should(together, processes):
    results = together(observe_all, processes)
    seen = results[0][0]
    assert all(other == seen for other, _ in results)
    assert {(one.windows, one.way) for one in seen} == {*RIGHT, *WRONG}
    for one in seen:
        key, counts = (one.windows, one.way), (one.events.count("all-reduce"), steps(one))
        if key in RIGHT:
            assert (counts, set(one.gradients)) == (RIGHT[key], {EQUAL}), one
        else:
            said = ["off" if "off" in words else words for words in one.gradients]
            assert (said, counts[1]) == (WRONG[key], len(WRONG[key])), one
        parameters = 8 * 16 + 16 + 16 + 1
        assert one.bytes_shared == counts[0] * parameters * 4
    assert all(windows == [EQUAL, 1] * 8 for _, windows in results)
    share_in_the_last_backward(seen)
    drawn = accumulation.draw(seen).axes[0].texts
    assert [text.get_text() for text in drawn][:-1] == [*map(accumulation.in_words, seen)]


def share_in_the_last_backward(seen: list[Seen]) -> None:
    """Gradients are shared after the last forward of a window and before the step that ends it."""
    window = [*["forward"] * 4, "all-reduce", "step"]
    expected = {
        ONE: ["forward", "all-reduce", "step"],
        FULL: window,
        TOKENS: window,
        SHORT: [*window, "forward", "forward", "all-reduce", "step"],
    }
    different = [one.way for one in seen if one.events != expected[one.windows]]
    assert different == ["DDP, without `no_sync`", "`accumulate`, optimizer not prepared"]
    often, unprepared = (one.events for one in seen if one.way in different)
    assert often == [*["forward", "all-reduce"] * 4, "step"]
    assert unprepared == [*["forward", "step"] * 3, "forward", "all-reduce", "step"]


def steps(one: Seen) -> int:
    return one.events.count("step")


@given(st.integers(-40, 40), st.integers(0, 2**31))
def test_a_multiple_of_the_right_gradient_is_told_by_its_factor(quarters, seed):
    right = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    said = accumulation.compare(torch.stack([right * quarters / 4] * 2), right)
    assert said == (EQUAL if quarters == 4 else f"×{quarters / 4:g}")


def test_ranks_that_do_not_agree_are_told_before_all_else():
    right = torch.ones(5)
    assert accumulation.compare(torch.stack([right, right * 2]), right) == "another on each rank"
    assert accumulation.compare(torch.stack([right] * 2), right) == EQUAL
    other = torch.tensor([1.0, 1, 1, 1, 6])
    assert accumulation.compare(torch.stack([other] * 3), right) == "off by 224%"


def test_steps_that_are_alike_are_said_together():
    def said(*gradients):
        return accumulation.in_words(Seen("", "", [], 0, list(gradients)))

    assert said("a", "a") == "a"
    assert said("a", "b") == "a, then b"
    assert said("a", "a", "a", "b") == "3 × a, then b"


def test_the_right_gradient_counts_each_token_once():
    model, lengths = torch.nn.Linear(8, 1), [3, 1]
    inputs = torch.randn(2, 3, 8)
    targets = torch.randn(2, 3, 1)
    is_token = torch.tensor([[True] * 3, [True, False, False]])
    samples = inputs, targets, is_token
    mine = accumulation.right_gradient(model, samples, torch.device("cpu"))
    tokens = [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    for row, at in tokens:
        ((model(inputs[row, at]) - targets[row, at]) ** 2 / len(tokens)).sum().backward()
    its = torch.cat([model.weight.grad.flatten(), model.bias.grad])
    assert torch.allclose(mine, its, atol=1e-6)


def test_one_process_is_told_that_it_has_nobody_to_share_with(start):
    result = start(["python", "-m", "accel_demo.anatomy.accumulation", "--processes", "1"])
    assert result.returncode == 2
    assert result.stderr == (
        "error: --processes must be at least 2: one process has nobody to share with\n"
    )

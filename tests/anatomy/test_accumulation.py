"""Compare one batch of 32 with 4 batches of 8, accumulated by correct and by incorrect methods."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.anatomy import accumulation
from accel_demo.anatomy.accumulation import EQUAL, FULL, ONE, SHORT, TOKENS, AccumulationRecord
from accel_demo.processes.devices import use_cpu

RIGHT = {  # (samples, method): (all-reduces, optimizer steps)
    (ONE, "one batch"): (1, 1),
    (FULL, "DDP, `no_sync` before the last"): (1, 1),
    (FULL, "DDP, without `no_sync`"): (4, 1),
    (FULL, "`accumulate`"): (1, 1),
    (FULL, "clip if `sync_gradients`"): (1, 1),
    (SHORT, "loss × 4 / true length"): (2, 2),
    (TOKENS, "sum / tokens of all processes"): (1, 1),
}
WRONG = {  # (samples, method): the expected gradient of each optimizer step
    (FULL, "DDP, loss not divided by 4"): ["×4"],
    (FULL, "`accumulate`, but `loss.backward()`"): ["×4"],
    (FULL, "`accumulate`, optimizer not prepared"): ["different on each rank"] * 3 + ["off"],
    (FULL, "`accumulate`, `zero_grad()` first"): ["off"],
    (FULL, "clip after every backward"): ["off"],
    (SHORT, "`accumulate` alone"): [EQUAL, "×0.5"],
    (TOKENS, "mean of each micro-batch"): ["off"],
}


def run_all() -> tuple:
    """Run everything that needs several processes, so that one launch is enough."""
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=accumulation.WINDOW)
    records = [accumulation.observe(accelerator, *method) for method in accumulation.METHODS]
    all_reduces = {case: all_reduces_of_a_backward(*case) for case in SENDS}
    return records, random_windows(), token_windows(), all_reduces


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request, together):
    return together(run_all, request.param)


def random_windows() -> list:
    """Accumulate by hand over windows of random length and batch size.

    For each window, returns the verdict of `compare` and the number of optimizer steps.
    """
    draw, results = random.Random(0), []
    rank, world_size = dist.get_rank(), dist.get_world_size()
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
        batches = zip(inputs[:, rank], targets[:, rank], strict=True)
        accumulation.by_hand(None, model, optimizer, batches, window=window)
        samples = inputs.flatten(0, 2), targets.flatten(0, 2)
        right = accumulation.right_gradient(model.module, samples, torch.device("cpu"))
        gathered = [torch.empty_like(used[0]) for _ in range(world_size)]
        dist.all_gather(gathered, used[0])
        results += [accumulation.compare(torch.stack(gathered), right), len(used)]
    return results


def test_each_method_has_the_expected_all_reduces_steps_and_gradients(results):
    records = results[0][0]
    assert all(others == records for others, *_ in results)
    assert {(record.samples, record.method) for record in records} == {*RIGHT, *WRONG}
    for record in records:
        key, all_reduces = (record.samples, record.method), record.events.count("all-reduce")
        steps = record.events.count("step")
        if key in RIGHT:
            expected = (RIGHT[key], {EQUAL})
            assert ((all_reduces, steps), set(record.gradients)) == expected, record
        else:
            gradients = ["off" if "off" in words else words for words in record.gradients]
            assert (gradients, steps) == (WRONG[key], len(WRONG[key])), record
        parameters = 8 * 16 + 16 + 16 + 1
        assert record.bytes_shared == all_reduces * parameters * 4
    assert all(windows == [EQUAL, 1] * 8 for _, windows, _, _ in results)
    share_in_the_last_backward(records)
    axes = accumulation.draw(records).axes[0]
    marks, lanes = ([text.get_text() for text in t] for t in (axes.texts, axes.get_yticklabels()))
    assert lanes == [
        "A · 1 × 32: one batch",
        "B · 4 × 8: 9 methods",
        "C · 4 × 8: DDP, without no_sync",
        "D · 4 × 8: accumulate, optimizer not prepared",
        "E · 4 × 8, then 2 × 8: 2 methods",
    ]
    assert marks == ["1 right", "4 right", "5 wrong", "1 right", "1 wrong", "1 right", "1 wrong"]


def share_in_the_last_backward(records: list[AccumulationRecord]) -> None:
    """Check that every method but two has one all-reduce per optimizer step, right before it."""
    window = [*["forward"] * 4, "all-reduce", "step"]
    expected = {
        ONE: ["forward", "all-reduce", "step"],
        FULL: window,
        TOKENS: window,
        SHORT: [*window, "forward", "forward", "all-reduce", "step"],
    }
    different = {r.method: r.events for r in records if r.events != expected[r.samples]}
    assert list(different) == ["DDP, without `no_sync`", "`accumulate`, optimizer not prepared"]
    often, unprepared = different.values()
    assert often == [*["forward", "all-reduce"] * 4, "step"]
    assert unprepared == [*["forward", "step"] * 3, "forward", "all-reduce", "step"]


def token_windows() -> list[str]:
    """Return the verdict of `compare` for a full and a short window of sequences."""
    accelerator = Accelerator(cpu=use_cpu())
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(8, 1))
    optimizer, used = torch.optim.SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(
        lambda *_: used.append(parameters_to_vector(one.grad for one in model.parameters()))
    )
    per_window = accumulation.WINDOW * 3 * accelerator.num_processes
    count = per_window * 3 // 2  # 6 micro-batches of 3 sequences on each process
    is_token = torch.arange(9) < torch.randint(1, 10, (count, 1))
    data = TensorDataset(torch.randn(count, 9, 8), torch.randn(count, 9, 1), is_token)
    accumulation.tokens(accelerator, model, optimizer, accelerator.prepare(DataLoader(data, 3)))
    windows = [data[:per_window], data[per_window:]]
    verdicts = []
    for gradient, window in zip(used, windows, strict=True):
        right = accumulation.right_gradient(model.module, window, accelerator.device)
        verdicts.append(accumulation.compare(accelerator.gather(gradient[None]), right))
    return verdicts


def test_tokens_weigh_the_same_in_a_full_and_in_a_short_window(results):
    assert all(verdicts == [EQUAL] * 2 for _, _, verdicts, _ in results)


# (forward under no_sync, backward under no_sync): the number of all-reduces in backward
SENDS = {(False, False): 1, (False, True): 1, (True, False): 0, (True, True): 0}


def all_reduces_of_a_backward(no_sync_forward: bool, no_sync_backward: bool) -> int:
    model, all_reduces = DistributedDataParallel(torch.nn.Linear(3, 1)), []

    def count(_, bucket):
        all_reduces.append(bucket)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, count)
    with model.no_sync() if no_sync_forward else nullcontext():
        loss = model(torch.ones(2, 3)).sum()
    with model.no_sync() if no_sync_backward else nullcontext():
        loss.backward()
    return len(all_reduces)


def test_the_forward_decides_whether_backward_sends(results):
    assert all(all_reduces == SENDS for *_, all_reduces in results)


@given(st.integers(-40, 40), st.integers(0, 2**31))
def test_a_multiple_of_the_correct_gradient_is_described_by_its_factor(quarters, seed):
    right = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    words = accumulation.compare(torch.stack([right * quarters / 4] * 2), right)
    assert words == (EQUAL if quarters == 4 else f"×{quarters / 4:g}")


def test_a_difference_between_ranks_is_reported_first():
    right = torch.ones(5)
    assert accumulation.compare(torch.stack([right, right * 2]), right) == "different on each rank"
    assert accumulation.compare(torch.stack([right] * 2), right) == EQUAL
    wrong = torch.tensor([1.0, 1, 1, 1, 6])
    assert accumulation.compare(torch.stack([wrong] * 3), right) == "off by 224%"


def test_repeated_gradients_are_summarized_with_a_count():
    def summary(*gradients):
        return accumulation.gradient_summary(AccumulationRecord("", "", [], 0, list(gradients)))

    assert summary("a", "a") == "a"
    assert summary("a", "b") == "a, then b"
    assert summary("a", "a", "a", "b") == "a in 3 steps, then b"


def test_the_correct_gradient_weights_every_token_equally():
    model, lengths = torch.nn.Linear(8, 1), [3, 1]
    inputs = torch.randn(2, 3, 8)
    targets = torch.randn(2, 3, 1)
    is_token = torch.tensor([[True] * 3, [True, False, False]])
    samples = inputs, targets, is_token
    right = accumulation.right_gradient(model, samples, torch.device("cpu"))
    tokens = [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    for row, at in tokens:
        ((model(inputs[row, at]) - targets[row, at]) ** 2 / len(tokens)).sum().backward()
    by_token = torch.cat([model.weight.grad.flatten(), model.bias.grad])
    assert torch.allclose(right, by_token, atol=1e-6)

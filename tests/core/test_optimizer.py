"""Test the optimizers, their fused steps, and the schedules for runs of any length."""

import copy
import importlib.machinery
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.imports import is_lomo_available

from accel_demo.config import OPTIMIZERS, TrainConfig
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from tests.runs import reset_accelerate


def learning_rates(total_steps: int, **choices) -> list[float]:
    config = TrainConfig(model="tiny_cnn", **choices)
    optimizer = make_optimizer(config, make_model(config), "no")
    scheduler = make_scheduler(config, optimizer, total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("total_steps", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.25, 0.99])
def test_the_learning_rate_rises_falls_and_stays_between_zero_and_its_peak(total_steps, warmup):
    rates = learning_rates(total_steps, learning_rate=0.5, warmup=warmup)
    assert all(0 < rate <= 0.5 for rate in rates)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_learning_rate_peaks_after_the_warmup_and_ends_near_zero():
    rates = learning_rates(100, learning_rate=0.5, warmup=0.25)
    assert rates.index(max(rates)) == 25 and rates[25] == 0.5
    assert rates[-1] < 0.001


def test_the_constant_schedule_never_changes_the_learning_rate():
    assert learning_rates(8, learning_rate=0.5, schedule="constant") == [0.5] * 8


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_uses_the_weight_decay_of_the_config(name):
    for config in (TrainConfig(optimizer=name), TrainConfig(optimizer=name, weight_decay=0.03)):
        optimizer = make_optimizer(config, torch.nn.Linear(1, 1), "no")
        assert optimizer.param_groups[0]["weight_decay"] == config.weight_decay


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_changes_the_weights(name):
    config = TrainConfig(model="tiny_cnn", optimizer=name)
    model = make_model(config)
    optimizer = make_optimizer(config, model, "no")
    assert type(optimizer).__name__.lower() == name
    assert optimizer.defaults["lr"] == config.learning_rate
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    after = model.parameters()
    assert all((old != new).any() for old, new in zip(before, after, strict=True))


def test_accelerate_does_not_search_the_disk_for_lomo_in_every_step(monkeypatch):
    def search(*arguments):
        raise AssertionError("searched sys.path")

    make_optimizer(TrainConfig(), torch.nn.Linear(1, 1), "no")
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", search)
    assert not is_lomo_available()


@pytest.mark.parametrize(
    ("model", "name"),
    [*(("small_cnn", name) for name in OPTIMIZERS), ("resnet18", "adamw"), ("vgg11", "sgd")],
)
def test_a_fused_step_changes_the_weights_like_an_unfused_step(model, name):
    """The gradients come from a real backward pass, because their memory layout matters.

    The fused CPU kernel processes memory in order and ignores strides.
    """
    config = TrainConfig(model=model, optimizer=name)
    initial = make_model(config)
    initial(torch.rand(2, 1, 28, 28)).square().sum().backward()
    fused, unfused = (three_steps(config, initial, precision) for precision in ("no", "fp16"))
    for before, *after in zip(initial.parameters(), fused, unfused, strict=True):
        assert (after[0] != before).any()
        assert (after[0] - after[1]).abs().max() < 1e-6


def three_steps(config: TrainConfig, initial: torch.nn.Module, precision: str):
    """Return the weights after three optimizer steps that all use the gradients of `initial`."""
    model = copy.deepcopy(initial)  # without the gradients
    for parameter, with_gradient in zip(model.parameters(), initial.parameters(), strict=True):
        parameter.grad = with_gradient.grad.clone()  # in the same memory layout
    optimizer = make_optimizer(config, model, precision)
    assert optimizer.defaults["fused"] is (None if precision == "fp16" else True)
    for _ in range(3):
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def by_hand(model, optimizer, scheduler):
    """Return a function that performs an fp16 step as train_plain, train_dp and train_ddp do."""
    scaler = torch.amp.GradScaler("cpu")

    def step(gradient: float) -> None:
        scaler.scale(model.weight.sum()).backward()
        model.weight.grad.fill_(gradient)
        scaler.unscale_(optimizer)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= scale:
            scheduler.step()

    return step


def by_accelerate(model, optimizer, scheduler):
    """Return a function that performs an fp16 step as train.py does."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    accelerator.scaler = scaler = torch.amp.GradScaler("cpu")  # as Accelerate does on a GPU
    model, prepared, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(gradient: float) -> None:
        accelerator.backward(model.weight.sum())
        model.weight.grad.fill_(gradient)
        scaler.unscale_(optimizer)  # as accelerator.clip_grad_norm_ does
        prepared.step()
        prepared.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            scheduler.step()

    return step


def with_an_overflow(make_step, name: str, precision: str) -> tuple[list, list]:
    """Take three steps, the second with an infinite gradient.

    Return the weights and the learning rates before the first step and after each step.
    """
    config = TrainConfig(optimizer=name)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = make_optimizer(config, model, precision)
    scheduler = make_scheduler(config, optimizer, 100)
    step = make_step(model, optimizer, scheduler)
    weights, rates = [model.weight.tolist()], [optimizer.param_groups[0]["lr"]]
    for gradient in (1e5, math.inf, 1e5):  # already scaled; the initial loss scale is 65536
        step(gradient)
        weights.append(model.weight.tolist())
        rates.append(optimizer.param_groups[0]["lr"])
    reset_accelerate()
    return weights, rates


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_fp16_a_step_that_overflows_is_skipped_in_all_versions(name):
    weights, rates = with_an_overflow(by_hand, name, "fp16")
    assert weights[0] != weights[1] == weights[2] != weights[3]
    assert rates[0] != rates[1] == rates[2] != rates[3]
    assert (weights, rates) == with_an_overflow(by_accelerate, name, "fp16")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accelerate_does_not_notice_that_a_fused_optimizer_has_skipped_a_step(name):
    """This is why fp16 uses unfused optimizers. If this test fails, they are no longer needed."""
    for make_step, is_noticed in ((by_hand, True), (by_accelerate, False)):
        weights, rates = with_an_overflow(make_step, name, "no")
        assert weights[0] != weights[1] == weights[2] != weights[3]
        assert rates[0] != rates[1] and (rates[1] == rates[2]) is is_noticed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_from_an_unfused_optimizer_produces_the_same_weights(name, tmp_path):
    """Earlier versions saved unfused optimizers. When one is resumed, it stays unfused."""
    config = TrainConfig(optimizer=name)
    model = torch.nn.Linear(3, 2)
    unfused = make_optimizer(config, model, "fp16")

    def step(model, optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    step(model, unfused)
    torch.save(unfused.state_dict(), tmp_path / "optimizer.bin")
    resumed_model = copy.deepcopy(model)
    resumed = make_optimizer(config, resumed_model, "no")
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.bin", weights_only=True))
    for _ in range(5):
        step(model, unfused)
        step(resumed_model, resumed)
    assert torch.equal(model.weight, resumed_model.weight)
    assert torch.equal(model.bias, resumed_model.bias)

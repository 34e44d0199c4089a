"""The schedule: one cycle, over a run of any length."""

import importlib.machinery

import pytest
import torch
from accelerate.utils.imports import is_lomo_available

from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler


def curve(total_steps: int, **choices) -> list[float]:
    config = TrainConfig(model="tiny_cnn", **choices)
    optimizer = make_optimizer(config, make_model(config))
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
    rates = curve(total_steps, learning_rate=0.5, warmup=warmup)
    assert all(0 < rate <= 0.5 for rate in rates)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_curve_has_its_peak_after_the_warmup_and_ends_near_zero():
    rates = curve(100, learning_rate=0.5, warmup=0.25)
    assert rates.index(max(rates)) == 25 and rates[25] == 0.5
    assert rates[-1] < 0.001


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_every_optimizer_moves_the_weights(name):
    config = TrainConfig(model="tiny_cnn", optimizer=name)
    model = make_model(config)
    optimizer = make_optimizer(config, model)
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
        raise AssertionError("looked through sys.path")

    make_optimizer(TrainConfig(), torch.nn.Linear(1, 1))
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", search)
    assert not is_lomo_available()

"""Training depends on the global batch size, not on the number of processes."""

import importlib
import math
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.models import make_model

program = importlib.import_module("23_effective_batch")
BATCH, IMAGES, LEARNING_RATE = program.BATCH, program.IMAGES, program.LEARNING_RATE


def train_by_every_plan(device) -> tuple:
    plans = program.make_plans(dist.get_world_size())
    results = program.train_all(plans, device)
    return [plan for plan in plans if dist.get_rank() < plan.processes], results


def test_training_depends_on_the_global_batch_and_not_on_the_process_count(together):
    by_rank = together(train_by_every_plan, 4)
    weights_by_plan = {}  # for each plan, the weights on every rank that trains
    for plans, results in by_rank:
        for plan, result in zip(plans, results, strict=True):
            weights_by_plan.setdefault(plan, []).append(result.weights)
            assert result.steps == IMAGES // plan.global_batch
    for plan, weights in weights_by_plan.items():
        assert len(weights) == plan.processes
        assert all(torch.equal(other, weights[0]) for other in weights)
        alone = train_alone(plan.global_batch, plan.learning_rate)
        assert (alone - weights[0]).abs().max() < 1e-5, plan
    plans, results = by_rank[0]
    rows = program.rows(plans, results)
    assert [row[1:6] for row in rows[:6]] == [
        [1, 32, 32, 32, "0.02"],
        [2, 16, 32, 32, "0.02"],
        [4, 8, 32, 32, "0.02"],
        [2, 32, 64, 16, "0.02"],
        [4, 32, 128, 8, "0.02"],
        [1, 128, 128, 8, "0.02"],
    ]
    assert [row[6:] for row in rows] == [
        ["2, 3", "about the same"],
        ["1, 3", "about the same"],
        ["1, 2", "about the same"],
        ["none", "higher"],
        ["6", "higher"],
        ["5", "higher"],
        ["none", "higher"],
        ["none", "higher"],
        ["none", "about the same"],
        ["none", "about the same"],
    ]
    figure = program.draw(plans, results)
    labels = " ".join(text.get_text() for text in figure.axes[0].get_legend().get_texts())
    assert all(f"{plan.processes} × {plan.batch_size}" in labels for plan in plans)


@cache
def train_alone(batch: int, learning_rate: float) -> torch.Tensor:
    """Train on the same batches without a process group, sampler or loader; return the weights."""
    config = TrainConfig(model="tiny_cnn", train_samples=IMAGES)
    torch.manual_seed(config.seed)
    train_set, _ = load_datasets(config)
    model = make_model(config)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(config.seed))
    for chosen in order.split(batch):
        images, labels = train_set.__getitems__(chosen.tolist())
        weights = list(model.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(images), labels), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= learning_rate * gradient
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_plans_keep_the_global_batch_or_increase_it_with_one_of_three_learning_rates():
    for processes in (2, 3, 4, 8, 100):
        plans = program.make_plans(processes)
        counts = sorted({plan.processes for plan in plans})
        assert counts == [n for n in (1, 2, 4, 8, 16, 32) if n <= processes]
        assert len(set(plans)) == len(plans)
        assert all(IMAGES % plan.global_batch == 0 for plan in plans)
        for n in counts[1:]:
            planned = [(p.batch_size, p.learning_rate) for p in plans if p.processes == n]
            rates = [LEARNING_RATE, LEARNING_RATE * math.sqrt(n), LEARNING_RATE * n]
            assert planned == [(BATCH // n, LEARNING_RATE), *((BATCH, rate) for rate in rates)]
    assert program.BatchPlan(4, 32, 0.02).global_batch == 128

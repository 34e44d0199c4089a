"""It is the global batch that training depends on, and not how many processes share it."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_demo.anatomy import effective_batch
from accel_demo.anatomy.effective_batch import BATCH, IMAGES, LEARNING_RATE, BatchPlan
from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.models import make_model


def train_in_every_way(device) -> tuple:
    runs = effective_batch.plan(dist.get_world_size())
    trained = effective_batch.train_all(runs, device)
    taken = [run for run in runs if dist.get_rank() < run.processes]
    return taken, trained


def test_the_global_batch_decides_and_not_the_processes(together):
    results = together(train_in_every_way, 4)
    weights = {}  # of each run, as each of its ranks has them
    for taken, trained in results:
        for run, mine in zip(taken, trained, strict=True):
            weights.setdefault(run, []).append(mine.weights)
            assert mine.steps == IMAGES // run.global_batch
    for run, everyones in weights.items():
        assert len(everyones) == run.processes
        assert all(torch.equal(its, everyones[0]) for its in everyones)
        alone = train_alone(run.global_batch, run.learning_rate)
        assert (alone - everyones[0]).abs().max() < 1e-5, run
    runs, trained = results[0]
    rows = effective_batch.rows(runs, trained)
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
    words = [f"{run.processes} × {run.batch_size}" for run in runs]
    figure = effective_batch.draw(runs, trained)
    said = " ".join(text.get_text() for text in figure.axes[0].get_legend().get_texts())
    assert all(word in said for word in words)


def train_alone(batch: int, learning_rate: float) -> torch.Tensor:
    """The same training without any process group, sampler or loader."""
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


def test_the_plan_has_the_same_batch_then_more_of_it_then_the_two_rules():
    for processes in (2, 3, 4, 8, 100):
        runs = effective_batch.plan(processes)
        counts = sorted({run.processes for run in runs})
        assert counts == [n for n in (1, 2, 4, 8, 16, 32) if n <= processes]
        assert len(set(runs)) == len(runs)
        assert all(IMAGES % run.global_batch == 0 for run in runs)
        for n in counts[1:]:
            mine = [(r.batch_size, r.learning_rate) for r in runs if r.processes == n]
            rates = [LEARNING_RATE, LEARNING_RATE * math.sqrt(n), LEARNING_RATE * n]
            assert mine == [(BATCH // n, LEARNING_RATE), *((BATCH, rate) for rate in rates)]
    assert BatchPlan(4, 32, 0.02).global_batch == 128


def test_two_processes_at_least_are_compared(start):
    result = start(["python", "-m", "accel_demo.anatomy.effective_batch", "--processes", "1"])
    assert result.returncode == 2
    assert result.stderr == (
        "error: --processes must be at least 2: one process has nothing to compare with\n"
    )

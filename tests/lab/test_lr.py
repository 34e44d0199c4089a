"""Test what `accel-demo lr` measures for each rule that adapts a schedule to several processes."""

import dataclasses
import math
import statistics

import pytest
import torch
import torch.nn.functional as F

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab.lr import command as lr
from accel_demo.lab.lr import comparison
from accel_demo.lab.lr.rules import BATCH, LOSSES, RULES, TEST_IMAGES
from accel_demo.lab.lr.tables import TOLERANCE
from accel_demo.lab.lr.training import RuleTraining, train_with_rules
from accel_demo.models import make_model
from accel_demo.optimizer import make_optimizer, make_scheduler
from accel_demo.processes import group
from tests.lab.measured import run_measured

SAMPLES = lr.QUICK_SAMPLES


def by_rule(content: dict) -> dict[tuple[str, int], dict]:
    """Map (rule, processes) to the row of the JSON file."""
    for row in content["rows"]:
        row["learning_rates"], row["losses"] = dict(row["learning_rates"]), dict(row["losses"])
    return {(row["rule"], row["processes"]): row for row in content["rows"]}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run_measured(tmp_path_factory.mktemp("lr"), "lr --quick --seeds 2")


@pytest.fixture(scope="module")
def runs(quick):
    return by_rule(quick.json)


@pytest.fixture(scope="module")
def one(runs):
    return runs["one process", 1]


def test_the_results_contain_one_run_on_one_process_and_each_rule_on_two(quick, runs):
    assert quick.stdout.startswith(
        "1 and 2 connected processes; every run sees the same 1024 images once; 2 seeds"
    )
    assert list(runs) == [("one process", 1), *((rule.name, 2) for rule in RULES)]


@pytest.mark.parametrize("rule", ["right", "right, by split_batches"])
def test_the_correct_rules_have_equal_rates_and_weights_on_one_and_two_processes(runs, one, rule):
    two = runs[rule, 2]
    assert two["learning_rates"] == one["learning_rates"]
    assert two["largest_weight_difference"] < TOLERANCE
    assert two["global_batch"] == one["global_batch"] == BATCH
    assert all(abs(two["losses"][seen] - loss) < 1e-4 for seen, loss in one["losses"].items())


def test_a_scheduler_stepped_by_every_process_finishes_after_half_of_the_images(runs, one):
    stepped = runs["scheduler stepped ×N", 2]
    assert one["schedule_ends_at"] == SAMPLES
    assert stepped["schedule_ends_at"] == SAMPLES // 2
    assert stepped["optimizer_steps"] == one["optimizer_steps"]
    for seen, rate in stepped["learning_rates"].items():
        assert rate == one["learning_rates"][min(2 * seen, SAMPLES)]


def test_the_loss_no_longer_changes_after_the_schedule_has_finished(runs, one):
    losses = runs["scheduler stepped ×N", 2]["losses"]
    late = {loss for seen, loss in losses.items() if seen >= SAMPLES // 2}
    assert len(late) == 1 and late != {losses[SAMPLES // 4]}
    assert late.pop() > one["losses"][SAMPLES] + 0.2


def test_accelerate_keeps_the_schedule_but_not_the_global_batch_by_default(runs, one):
    default = runs["global batch ×N, by default", 2]
    assert default["global_batch"] == 2 * BATCH
    for seen, rate in default["learning_rates"].items():
        assert rate == one["learning_rates"][seen]
    assert default["largest_weight_difference"] > 100 * TOLERANCE


def test_the_learning_rate_is_scaled_only_on_request(runs, one):
    larger = runs["global batch ×N", 2]["learning_rates"]
    assert max(larger.values()) == pytest.approx(max(one["learning_rates"].values()), rel=0.01)
    for end, factor in (("×√N", math.sqrt(2)), ("×N", 2)):
        scaled = runs[f"global batch ×N, learning rate {end}", 2]["learning_rates"]
        assert list(scaled) == list(larger)
        assert list(scaled.values()) == pytest.approx([factor * rate for rate in larger.values()])


def test_a_scaled_learning_rate_compensates_for_a_larger_global_batch(runs):
    ends = ["", ", learning rate ×√N", ", learning rate ×N"]
    none, root, linear = (runs[f"global batch ×N{end}", 2]["loss_differences"][0] for end in ends)
    assert linear < 0.8 * root and root < 0.95 * none


def test_losses_are_measured_at_equal_numbers_of_images_seen(runs):
    marks = [SAMPLES * mark // LOSSES for mark in range(LOSSES + 1)]
    assert all(list(run["losses"]) == marks for run in runs.values())
    assert len({run["losses"][0] for run in runs.values()}) == 1  # the same initial weights


def test_the_run_on_one_process_is_plain_training(one):
    """Compare the run with a plain PyTorch loop without Accelerate and without a DataLoader."""
    choices = {"optimizer": "sgd", "weight_decay": 5e-4, "learning_rate": lr.LEARNING_RATE}
    choices |= {"train_samples": SAMPLES, "test_samples": TEST_IMAGES}
    config = TrainConfig(model="tiny_cnn", **choices)
    torch.manual_seed(config.seed)
    model = make_model(config)
    train_set, test_set = load_datasets(config)
    optimizer = make_optimizer(config, model, "no")
    scheduler = make_scheduler(config, optimizer, SAMPLES // BATCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
    for seen, chosen in enumerate(order.split(BATCH)):
        assert optimizer.param_groups[0]["lr"] == one["learning_rates"][seen * BATCH]
        images, labels = train_set.__getitems__(chosen.tolist())
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    images, labels = test_set.__getitems__(list(range(TEST_IMAGES)))
    with torch.no_grad():
        assert F.cross_entropy(model(images), labels).item() == pytest.approx(
            one["final_losses"][0], abs=1e-4
        )


def test_the_table_and_the_picture_show_the_measured_values(quick, runs):
    lines = [line for line in quick.stdout.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[1:]]
    for row, run in zip(cells, runs.values(), strict=True):
        assert row[:4] == [
            *(run["rule"], str(run["processes"]), str(run["global_batch"])),
            str(run["optimizer_steps"]),
        ]
        assert row[5] == str(run["schedule_ends_at"])
        assert row[6] == ("equal" if run["largest_weight_difference"] <= TOLERANCE else "different")
        columns = run["loss_differences"], run["final_losses"]
        assert row[7:] == [f"{statistics.median(values):.2f}" for values in columns]
    words = ["one process", "scheduler stepped ×N", "global batch ×N, learning rate ×√N"]
    assert all(f"<!-- {word} -->" in quick.picture for word in words)


def test_unconnected_processes_and_different_final_weights_are_errors(monkeypatch):
    """Fake the launch: a real one would connect the processes and give them equal weights."""
    run = RuleTraining("right", 0, 2, {0: 1.0, 32: 0.0}, {0: 1.0}, torch.zeros(2))
    alone = dataclasses.replace(run, processes=1)
    other = dataclasses.replace(run, weights=torch.ones(2))
    for second, message in ((alone, "different number connected"), (other, "different weights")):
        by_rank = [[run], [second]]
        monkeypatch.setattr(
            comparison.group, "results_by_rank", lambda *_, by_rank=by_rank: by_rank
        )
        with pytest.raises(RuntimeError, match=message):
            comparison.measure(2, SAMPLES, 0.01, seeds=1)


def test_a_training_run_that_diverges_is_a_one_line_error(monkeypatch):
    """Fake a launch that returns NaN weights, which are not even equal to themselves."""
    rates, losses = {0: 1.0, 32: 0.0}, {0: 2.3, 32: math.nan}
    run = RuleTraining("right", 0, 2, rates, losses, torch.full((2,), math.nan))
    monkeypatch.setattr(group, "results_by_rank", lambda *_: [[run], [run]])
    with pytest.raises(UserError, match="^right, processes: 2: .* --learning-rate below 1e\\+06.$"):
        comparison.measure(2, SAMPLES, 1e6, seeds=1)


def test_each_seed_is_compared_with_the_same_seed_on_one_process(runs, one):
    two = runs["right", 2]
    assert len(set(one["final_losses"])) == 2, "different seeds have different losses"
    assert two["final_losses"] == pytest.approx(one["final_losses"], abs=1e-4)
    assert max(two["loss_differences"]) < 1e-4 and len(two["loss_differences"]) == 2
    assert two["largest_weight_difference"] < TOLERANCE
    assert one["losses"][SAMPLES] == pytest.approx(sum(one["final_losses"]) / 2)


@pytest.mark.slow
def test_on_four_processes_the_schedule_finishes_after_a_quarter_of_the_images(tmp_path):
    result = run_measured(tmp_path, "lr --processes 2,4 --samples 1024 --seeds 1")
    runs = by_rule(result.json)
    one, stepped = runs["one process", 1], runs["scheduler stepped ×N", 4]
    assert result.stdout.startswith("1, 2 and 4 connected processes")
    assert stepped["schedule_ends_at"] == 256
    for rule in ("right", "right, by split_batches"):
        assert runs[rule, 4]["learning_rates"] == one["learning_rates"]
        assert runs[rule, 4]["largest_weight_difference"] < TOLERANCE


def losses_at_two_rates(device, names: list[str]) -> list[dict]:
    """Return each rule's losses at the default learning rate and at five times that rate."""
    rules = [rule for rule in RULES if rule.name in names]
    rates = (lr.LEARNING_RATE, 5 * lr.LEARNING_RATE)
    runs = [train_with_rules(device, lr.SAMPLES, rate, rules) for rate in rates]
    return [{run.rule: run.losses for run in at_one_rate} for at_one_rate in runs]


@pytest.mark.slow
def test_the_linear_scaling_rule_works_best_with_a_small_learning_rate(together):
    names = ["global batch ×N", "global batch ×N, learning rate ×N"]
    (one,) = together(losses_at_two_rates, 1, names=["right"])
    two, _ = together(losses_at_two_rates, 2, names=names)
    gains = []
    for on_one, on_two in zip(one, two, strict=True):
        alone = on_one["right"]
        none, linear = (
            sum(abs(loss - alone[seen]) for seen, loss in on_two[name].items()) for name in names
        )
        gains.append(none / linear)
    low, high = gains
    assert low > 2 * high and low > 3

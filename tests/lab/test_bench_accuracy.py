"""Test how `bench accuracy` and `bench startup` measure times, and which input they reject."""

import json
import math
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from accel_demo.data import ASSETS, FASHION_MNIST_SUMS
from accel_demo.errors import UserError
from accel_demo.lab.bench import accuracy, baseline
from accel_demo.lab.bench.accuracy import (
    BASELINE,
    OURS,
    TimedTraining,
    compare,
    evaluations_of,
    time_to,
)
from accel_demo.lab.timed_command import (
    TimedRun,
    accelerate_launch,
    run_timed,
    time_training,
)

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def run_of(*accuracies: float, first_step: float = 2.0, threads: int = 1) -> TimedTraining:
    """Return a run in which each epoch takes ten seconds."""
    evaluations = [(first_step + 10 * (i + 1), each) for i, each in enumerate(accuracies)]
    return TimedTraining(first_step, evaluations, threads)


def times(report, title: str) -> dict[str, list[float]]:
    (table,) = (table for table in report.tables if table.title == title)
    return {name: row.values for name, row in table.rows.items()}


def test_the_time_to_a_target_ends_at_the_first_evaluation_that_reaches_it():
    evaluations = [(10.0, 0.88), (20.0, 0.90), (30.0, 0.91)]
    assert time_to(0.90, evaluations) == 20.0
    assert time_to(0.92, evaluations) == math.inf


def test_a_run_that_ends_just_below_the_target_is_timed_until_its_end():
    assert time_to(0.92, [(10.0, 0.89), (20.0, 0.9170)]) == 20.0
    assert time_to(0.92, [(10.0, 0.9199), (20.0, 0.9169)]) == math.inf


def test_a_target_is_reached_if_the_mean_over_the_seeds_reaches_it():
    assert accuracy.is_reached(0.92, [run_of(0.9180), run_of(0.9220)])
    assert not accuracy.is_reached(0.92, [run_of(0.9180), run_of(0.9219)])
    assert not accuracy.is_reached(0.92, [run_of(0.9160), run_of(0.9300)]), "one seed is too low"


def test_ratios_compare_runs_with_the_same_seed_and_the_same_starting_point():
    ours = {0.90: [run_of(0.91), run_of(0.91)]}
    report = compare(ours, [run_of(0.85, 0.90), run_of(0.85, 0.86, 0.90, first_step=5.0)])
    whole = "To 90 % test accuracy, from process start"
    steps = "To 90 % test accuracy, from the first step"
    assert times(report, whole) == {BASELINE: [22.0, 35.0], OURS: [12.0, 12.0]}
    assert times(report, steps) == {BASELINE: [20.0, 30.0], OURS: [10.0, 10.0]}
    assert report.tables[2].title == steps and report.tables[2].rows[BASELINE].median_ratio == 2.5
    assert (
        "To 90 %: 2.38 x faster from process start and 2.5 x from the first step (medians); "
        "2.38 x and 2.5 x by means."
    ) in report.findings


def test_a_missed_target_gets_no_time():
    report = compare({0.90: [run_of(0.91)], 0.92: [run_of(0.91)]}, [run_of(0.89, 0.91)])
    assert len(report.tables) == 3, "one table for the start-up and two for the 90 % target"
    faster = [line for line in report.findings if "x faster" in line]
    assert len(faster) == 1 and faster[0].startswith("To 90 %: ")
    verdict = "92 % (--epochs 3), seed by seed: 0.9100. Mean 0.9100, lowest 0.9100: MISSES IT"
    assert verdict in report.text()
    assert f"{BASELINE}, seed 0, epoch by epoch: 0.8900, 0.9100: it does not reach 92 %." in (
        report.findings
    )


def test_runs_with_different_numbers_of_threads_are_not_compared():
    with pytest.raises(RuntimeError, match="different numbers of threads"):
        compare({0.90: [run_of(0.91)]}, [run_of(0.91, threads=2)])


TRAINING = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[-1])
(folder / "environment.json").write_text(json.dumps({"processes": 1, "device": "cpu"}))
with open(folder / "metrics.jsonl", "a", buffering=1) as metrics:
    for line in ('{"train_loss": 0.6}', '{"test_accuracy": 0.8955}', '{"test_accuracy": 0.9203}'):
        time.sleep(0.5)
        metrics.write(line[:5])
        metrics.flush()
        metrics.write(line[5:] + "\\n")
"""


def test_the_files_of_a_run_are_timed_when_they_are_written():
    started_at = time.perf_counter()
    run = time_training(["python", "-c", TRAINING], processes=1)
    seconds = time.perf_counter() - started_at
    moments = [run.first_step_seconds, *(moment for moment, _ in run.metrics)]
    # On a busy machine, a file may be read late, but still well before the next one is written.
    assert all(later - earlier > 0.25 for earlier, later in zip(moments, moments[1:], strict=False))
    assert 0 < moments[0] and moments[-1] <= seconds
    assert run.environment == {"processes": 1, "device": "cpu"}
    lines = [{"train_loss": 0.6}, {"test_accuracy": 0.8955}, {"test_accuracy": 0.9203}]
    assert [line for _, line in run.metrics] == lines


def test_two_processes_are_not_mistaken_for_one():
    training = TRAINING.replace('"processes": 1', '"processes": 2')
    with pytest.raises(RuntimeError, match="^2 processes trained instead of 1$"):
        time_training(["python", "-c", training], processes=1)


def test_metrics_that_cannot_be_read_are_an_error():
    training = TRAINING.replace('"test_accuracy": 0.8955}', '"test_accuracy": }')
    with pytest.raises(json.JSONDecodeError):
        time_training(["python", "-c", training], processes=1)


def test_the_evaluations_are_rounded_and_come_from_a_run_on_the_cpu():
    environment = {"processes": 1, "device": "cpu", "threads_per_process": 2}
    metrics: list[tuple[float, dict]] = [
        (8.0, {"step": 90, "train_loss": 0.9, "train_accuracy": 0.7}),
        (9.0, {"step": 90, "test_loss": 0.6951, "test_accuracy": 0.89546}),
        (13.0, {"step": 180, "test_loss": 0.5951, "test_accuracy": 0.0}),
    ]
    expected = TimedTraining(5.0, [(9.0, 0.8955), (13.0, 0.0)], 2)
    assert evaluations_of(TimedRun(environment, 5.0, metrics)) == expected
    with pytest.raises(RuntimeError, match="trained on cuda instead of the CPU"):
        evaluations_of(TimedRun(environment | {"device": "cuda"}, 5.0, metrics))


def test_train_py_and_the_baseline_write_the_same_results_that_they_print(capfd):
    samples = ["--train-samples", "128"]
    launch = [*accelerate_launch("cpu.yaml"), "accel_demo/train.py", *samples, "--epochs", "2"]
    program = ["python", "-m", "accel_demo.lab.bench.baseline", "--data-dir", ASSETS, *samples]
    for command in (launch, [*program, "--epochs", "2", "--targets", "1"]):
        run = accuracy.train(command)
        (first, first_accuracy), (second, last_accuracy) = run.evaluations
        assert 0 < run.first_step_seconds < first < second and run.threads == 1
        printed = capfd.readouterr().err
        assert f"accuracy {first_accuracy:.4f}\n" in printed
        assert f"accuracy {last_accuracy:.4f}\n" in printed


def test_a_user_error_in_a_command_is_reported_in_one_sentence():
    for launcher in (["python"], accelerate_launch("cpu.yaml")):  # Accelerate exits with code 1
        with pytest.raises(UserError, match="^batch_size must be at least 1, got 0$"):
            run_timed([*launcher, "accel_demo/train.py", "--batch-size", "0"])
    with pytest.raises(RuntimeError, match="exit code 1\n(.|\n)*ZeroDivisionError"):
        run_timed(["python", "-c", "1 / 0"])
    with pytest.raises(RuntimeError, match="exit code 1\nerror: not ours\n"):
        run_timed(["python", "-c", "import sys; sys.exit('error: not ours')"])


def test_a_command_that_hangs_is_stopped_with_its_child_processes(tmp_path):
    code = "import subprocess, sys\nsleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
    code += "child = subprocess.Popen(sleep)\nopen(sys.argv[-1], 'w').write(str(child.pid))\n"
    code += "child.wait()"
    with pytest.raises(RuntimeError, match="took too long"):
        run_timed(["python", "-c", code, tmp_path / "pid"], time_limit=2)
    child = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(timeout=5)  # raises an error if it is still running
    assert not psutil.pid_exists(child)


def test_a_missing_launch_config_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("accel_demo.lab.timed_command.REPOSITORY", tmp_path)
    with pytest.raises(UserError, match="cpu.yaml is missing: it is in the repository"):
        accelerate_launch("cpu.yaml")


def test_the_baseline_has_as_many_parameters_as_the_mnist_example():
    assert sum(each.numel() for each in baseline.Net().parameters()) == 1_199_882


def test_the_baseline_prints_its_first_step_and_its_accuracy(start):
    command = ["python", "-m", "accel_demo.lab.bench.baseline", "--data-dir", ASSETS]
    command += ["--train-samples", "128", "--epochs", "3", "--targets", "0.05", "0.06"]
    result = start(command)
    assert result.returncode == 0, result.stderr
    first, epoch = result.stdout.splitlines()
    assert first == "first step, threads: 1"
    assert re.fullmatch(r"epoch 1: test accuracy 0\.\d{4}", epoch), "it stops after the last target"


def test_files_are_unpacked_for_torchvision_only_once():
    with baseline.torchvision_folder(ASSETS) as folder:
        raw = folder / "FashionMNIST" / "raw"
        assert {path.name for path in raw.iterdir()} == FASHION_MNIST_SUMS.keys()
        with baseline.torchvision_folder(folder) as again:
            assert again == folder
    assert not folder.exists() and ASSETS.exists()


def test_nothing_starts_without_the_data(start, tmp_path):
    result = start(["accel-demo", "bench", "accuracy", "--data-dir", tmp_path / "none"])
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"error: Fashion-MNIST is not in {tmp_path / 'none'}: on Debian run `apt-get"
    )


@pytest.mark.system
@pytest.mark.skipif(
    not FASHION_MNIST.exists(), reason="needs the Debian package dataset-fashion-mnist"
)
def test_both_programs_train_on_the_debian_package(start, tmp_path):
    command = ["accel-demo", "bench", "accuracy", "--data-dir", FASHION_MNIST, "--quick"]
    result = start([*command, "--json", tmp_path / "accuracy.json"], timeout=230)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "accuracy.json").read_text())
    assert f"{OURS} to 92 % (--epochs 3)" in result.stdout and report["facts"]["threads"] == 1
    (seconds, first_accuracy), *later = report["baseline"][0]["evaluations"]
    assert 0.5 < first_accuracy < 0.9 and not later
    assert "x faster" not in result.stdout, "2,000 images are too few to reach a target"
    assert "Only a quick look" in result.stdout and "MISSES IT" in result.stdout


@pytest.mark.slow
def test_startup_times_six_commands_and_help_is_the_fastest(start, tmp_path):
    written = tmp_path / "startup.json"
    result = start(["accel-demo", "bench", "startup", "--quick", "--json", written])
    assert result.returncode == 0, result.stderr
    commands, imports = json.loads(written.read_text())["tables"]
    assert len(commands["rows"]) == 6 and len(imports["rows"]) == 7
    help_seconds = commands["rows"]["accel-demo --help"]["median"]
    assert help_seconds == min(row["median"] for row in commands["rows"].values())

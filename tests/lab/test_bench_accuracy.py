"""Test how `bench accuracy` and `bench startup` measure times, and which input they reject."""

import json
import math
import re
from pathlib import Path

import psutil
import pytest

from accel_demo.data import ASSETS, FASHION_MNIST_SUMS
from accel_demo.errors import UserError
from accel_demo.lab.bench import accuracy, baseline
from accel_demo.lab.bench.accuracy import BASELINE, OURS, TimedTraining, compare, read_run, time_to
from accel_demo.lab.timed_command import Timed, accelerate_launch, run_timed

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


def test_the_output_of_both_programs_is_parsed():
    lines = [
        (5.0, "1 process on cpu (distributed_type NO): small_cnn on fashion-mnist, 128 images"),
        (9.0, "epoch 1/2: train loss 0.9, accuracy 0.7; test loss 0.6951, accuracy 0.8955"),
        (13.0, "epoch 2/2: train loss 0.6, accuracy 0.8; test loss 0.5951, accuracy 0.9203"),
        (13.1, "done: test accuracy 0.9203, 14,000 images/s, 8.0 s of training, 1 process on cpu"),
    ]
    ours = read_run(Timed(lines, 13.5), "1 process on cpu ", threads=2)
    assert ours == TimedTraining(5.0, [(9.0, 0.8955), (13.0, 0.9203)], 2)
    lines = [(3.0, "first step, threads: 2"), (60.0, "epoch 1: test accuracy 0.8812")]
    assert read_run(Timed(lines, 61.0), "first step", 2).evaluations == [(60.0, 0.8812)]


def test_two_processes_are_not_mistaken_for_one():
    lines = [(5.0, "2 processes on cpu (distributed_type MULTI_CPU, gloo): small_cnn on …")]
    with pytest.raises(RuntimeError, match="the first line is '2 processes"):
        read_run(Timed(lines, 6.0), "1 process on cpu ", threads=1)


def test_each_line_is_timed_when_it_is_printed():
    code = "import time; print('a'); time.sleep(0.5); print('b')"
    timed = run_timed(["python", "-c", code])
    (first, a), (second, b) = timed.lines
    assert (a, b) == ("a", "b")
    # On a busy machine, "a" may be read late, but still well before "b".
    assert 0 < first < first + 0.25 < second <= timed.seconds


def test_a_user_error_in_a_command_is_reported_in_one_sentence():
    with pytest.raises(UserError, match="^no such thing$"):
        run_timed(["python", "-c", "import sys; sys.exit('error: no such thing')"])
    with pytest.raises(RuntimeError, match="exit code 1\n(.|\n)*ZeroDivisionError"):
        run_timed(["python", "-c", "1 / 0"])


def test_a_command_that_hangs_is_stopped_with_its_child_processes():
    code = "import subprocess, sys\nsleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
    code += "child = subprocess.Popen(sleep)\nprint(child.pid)\nchild.wait()"
    children = []
    with pytest.raises(RuntimeError, match="took too long"):
        run_timed(
            ["python", "-c", code],
            on_line=lambda pid: children.append(psutil.Process(int(pid))),
            time_limit=2,
        )
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert (len(gone), alive) == (1, [])


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

"""Test the scripts in benchmarks/: what they compare, and that each of them runs."""

import json
import runpy
import sys

import accuracy
import article
import baseline
import measuring
import overhead
import pytest
import scaling
import torch
from accuracy import BASELINE, OURS
from measuring import CPU_LAUNCH, FinishedRun

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.lab.bench.command import BENCHMARKS
from accel_demo.models import make_model
from tests.conftest import REPOSITORY

TABLES = {  # {script: rows of each table, except for its targets that a quick run misses}
    "accuracy": [2],
    "audit": [2, 2, 2],
    "article": [2],  # and a third row if the CPU has bf16 instructions
    "input": [5],
    "overhead": [3, 2, 3, 2, 4],
    "scaling": [3],
    "startup": [6, 7],
}


def test_every_side_is_measured_once_per_repetition_in_a_new_order():
    calls = []
    sides = {name: lambda repeat, name=name: calls.append(name) or repeat for name in "abc"}
    assert measuring.in_turns(sides, 4, "") == dict.fromkeys("abc", [0, 1, 2, 3])
    orders = [calls[start : start + 3] for start in range(0, 12, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(map(tuple, orders))) > 1


PROGRAM = """
import json, sys, time
from pathlib import Path
folder, environment = Path(sys.argv[-1]), {"processes": 1, "device": "cpu"}
time.sleep(0.3)
(folder / "environment.json").write_text(json.dumps({**environment, "threads_per_process": 3}))
time.sleep(0.3)
lines = '{"test_accuracy": 0.1}', '{"test_loss": 1.0, "test_accuracy": 0.89546}'
(folder / "metrics.jsonl").write_text("\\n".join(lines) + "\\n")
time.sleep(0.3)
"""


def test_the_clock_stops_when_the_files_of_a_run_are_written():
    run = measuring.train(["python", "-c", PROGRAM])
    assert 0.3 <= run.first_step_seconds + 0.01, "the file system may round the time down"
    assert 0.3 <= run.end_seconds - run.first_step_seconds + 0.01
    assert (run.test_accuracy, run.threads) == (0.8955, 3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"processes": 1', '"processes": 2', "^2 processes on cpu trained, not 1 on cpu$"),
        ('"device": "cpu"', '"device": "cuda"', "^1 process on cuda trained, not 1 on cpu$"),
        ("import json", "raise SystemExit('the disk is full')", "the disk is full"),
    ],
)
def test_a_run_that_fails_or_trains_elsewhere_is_an_error(old, new, message):
    with pytest.raises(RuntimeError, match=message):
        measuring.train(["python", "-c", PROGRAM.replace(old, new)])


def runs_of(*accuracies: float, end: float = 12.0, first_step: float = 2.0, threads: int = 1):
    return [FinishedRun(first_step, end, each, threads) for each in accuracies]


def test_a_target_is_reached_if_the_mean_over_the_seeds_reaches_it():
    assert accuracy.is_reached(0.92, [0.9180, 0.9220])
    assert not accuracy.is_reached(0.92, [0.9180, 0.9219])
    assert not accuracy.is_reached(0.92, [0.9160, 0.9300]), "one seed is too low"


def test_the_times_to_a_target_are_compared_from_both_starting_points():
    slow = runs_of(0.90, end=22.0) + runs_of(0.90, end=35.0, first_step=5.0)
    report = accuracy.compare({0.90: {BASELINE: slow, OURS: runs_of(0.91, 0.91)}}, "")
    assert [table.title.rpartition(", ")[2] for table in report.tables] == [
        "From process start to the first step",
        "from process start",
        "from the first step",
    ]
    values = [{name: row.values for name, row in table.rows.items()} for table in report.tables]
    assert values == [
        {BASELINE: [2.0, 5.0], OURS: [2.0, 2.0]},
        {BASELINE: [22.0, 35.0], OURS: [12.0, 12.0]},
        {BASELINE: [20.0, 30.0], OURS: [10.0, 10.0]},
    ]
    assert report.tables[2].rows[BASELINE].median_ratio == 2.5, "of runs with the same seed"


def test_a_missed_target_gets_no_time():
    sides = {BASELINE: runs_of(0.93), OURS: runs_of(0.91)}
    report = accuracy.compare({0.90: sides, 0.92: sides}, "")
    assert [list(table.rows) for table in report.tables[1:]] == [[BASELINE, OURS]] * 2 + [
        [BASELINE]
    ] * 2
    verdict = "92 % (--epochs 3), seed by seed: 0.9100. Mean 0.9100, lowest 0.9100: MISSES IT"
    assert f"{OURS} to {verdict}" in report.text()


def test_runs_with_different_numbers_of_threads_are_not_compared():
    sides = {BASELINE: runs_of(0.91, threads=2), OURS: runs_of(0.91)}
    with pytest.raises(RuntimeError, match="different numbers of threads"):
        accuracy.compare({0.90: sides}, "")


def test_train_py_and_the_baseline_write_the_files_that_are_compared(tmp_path):
    images, command = tmp_path / "images.pt", ["accel_demo/train.py", "--train-samples", 128]
    sets = load_datasets(TrainConfig(train_samples=128))
    torch.save([(each.pixels[..., 0], each.labels) for each in sets], images)
    ours = [*CPU_LAUNCH.split(), *command, "--epochs", 1]
    theirs = ["python", "benchmarks/baseline.py", images, "--target", 0.05, "--epochs", 100]
    for command in (ours, theirs):  # the baseline stops at its target, long before the time limit
        run = measuring.train(command)
        assert 0 < run.first_step_seconds < run.end_seconds and run.threads == 1
        assert 0.05 < run.test_accuracy < 0.9


def test_the_networks_are_those_of_the_example_and_of_our_resnet101():
    assert sum(each.numel() for each in baseline.make_model().parameters()) == 1_199_882
    theirs = article.make_model().state_dict()
    ours = make_model(TrainConfig(model="resnet101")).state_dict()
    assert {name: value.shape for name, value in theirs.items()} == {
        name: value.shape for name, value in ours.items()
    }


class RecordedPool:
    """Return a recorded result instead of training."""

    def __init__(self, stamps: list[float], device="cpu", processes=1):
        self.result = {"stamps": stamps, "device": device, "processes": processes}
        self.result["seconds_per_step"] = (stamps[-1] - stamps[0]) / (len(stamps) - 1)

    def run(self, *_, **__) -> dict:
        return self.result


def test_only_the_time_in_which_all_processes_train_is_counted():
    choices = {"max_steps": 4}
    first, second = RecordedPool([0, 1, 2, 3]), RecordedPool([1.5, 2, 2.5, 3, 3.5])
    assert scaling.rate([first, second], choices, 10, 0) == 10 * 1 + 10 * 2
    assert scaling.rate([RecordedPool([0, 1, 2], processes=2)], choices, 10, 0) == 2 * 10
    with pytest.raises(RuntimeError, match="did not train at the same time"):
        scaling.rate([first, RecordedPool([2.5, 3.5])], choices, 10, 0)


def test_a_short_disturbance_does_not_change_the_step_time_on_a_cpu():
    stamps = [0.0, 1.0, 2.0, 9.0]
    assert overhead.step_time(RecordedPool(stamps), "Accelerate", "tiny_cnn", 0) == 1e6
    on_gpu = RecordedPool(stamps, "cuda")
    assert overhead.step_time(on_gpu, "Accelerate", "tiny_cnn", 0) == 3e6, "the mean"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("input --repeats 0", "--repeats must be at least 1, got 0"),
        ("scaling --accumulate 0", "accumulate must be at least 1, got 0"),
        ("overhead --quicker", "unrecognized arguments: --quicker"),
        ("startup --json {folder}/none/x.json", "cannot write --json {folder}/none/x.json"),
        ("accuracy --data-dir {folder}/none", "fashion-mnist is not in {folder}/none"),
    ],
)
def test_bad_input_causes_a_one_line_error(arguments, message, tmp_path, capsys, monkeypatch):
    name, *options = arguments.format(folder=tmp_path).split()
    script = str(REPOSITORY / "benchmarks" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *options])
    monkeypatch.setattr(measuring, "run_to_end", None)  # calling it would raise a TypeError
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(script, run_name="__main__")
    output = capsys.readouterr()
    assert (stopped.value.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert output.err.startswith("error: ") and message.format(folder=tmp_path) in output.err


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_quick_run_prints_and_saves_every_table(name, start, tmp_path):
    file = tmp_path / "report.json"
    command = ["python", f"benchmarks/{name}.py", "--quick", "--json", file]
    result = start(command, timeout=230)
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    assert report["command"] == f"python benchmarks/{name}.py"
    rows = [len(table["rows"]) for table in report["tables"]]
    assert rows == TABLES[name] or (name, rows) == ("article", [3])
    for table in report["tables"]:
        assert f"{table['title']} (1 repeat)" in result.stdout
        assert all(len(row["values"]) == 1 for row in table["rows"].values())
    if name in ("audit", "overhead", "scaling"):  # the others check what they run
        assert report["facts"]["processes"] == 2
    if name == "input":
        images = report["tables"][0]["rows"]
        assert images["ours, 0 workers"]["median_ratio"] > 20


def test_every_benchmark_has_a_recorded_result():
    commands = {name: ["accel-demo", "bench", name] for name in BENCHMARKS}
    commands |= {name: ["python", f"benchmarks/{name}.py"] for name in TABLES}
    for name, words in commands.items():
        record = REPOSITORY / "tutorials" / "transcripts" / "bench" / f"{name}.txt"
        command, *output = record.read_text().splitlines()
        assert command.split()[: len(words) + 1] == ["$", *words]
        assert output[-1].startswith("Measured on ") and "90 % interval" in "\n".join(output)


def test_the_introduction_quotes_two_recorded_speeds_of_small_cnn():
    records = REPOSITORY / "tutorials" / "transcripts" / "bench"
    quoted = {}
    for name, row in (("scaling", "1 process"), ("dataparallel", "plain PyTorch")):
        lines = (records / f"{name}.txt").read_text().splitlines()
        rates = [line.split("|")[2] for line in lines if line.startswith(f"| {row} ")]
        quoted[name] = int(rates[0].replace(",", "")) / 1000
    introduction = (REPOSITORY / "benchmarks/BENCHMARKS.md").read_text().partition("\n## ")[0]
    one_thread, two_threads = f"{quoted['scaling']:.1f}".replace(".", ","), quoted["dataparallel"]
    assert f"{one_thread}00 images/s in one table (one process with one thread)" in introduction
    assert f"{two_threads:.0f},000 in another (two threads)" in " ".join(introduction.split())

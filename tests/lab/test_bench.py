"""Test `accel-demo bench`, and the worker pool that it shares with `accel-demo scaling`."""

import json

import psutil
import pytest

from accel_demo.errors import one_line_errors
from accel_demo.lab.bench import command as bench
from accel_demo.lab.bench import dataparallel
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool

TINY = {"model": "tiny_cnn", "dataset": "synthetic", "train_samples": 640, "test_samples": 64}
TINY |= {"batch_size": 64, "max_steps": 5, "epochs": 2}


def test_two_connected_workers_time_every_step_of_each_version():
    with WorkerPool(2, threads=1, gpus=ON_CPU) as pair:
        for version in ("raw DDP", "Accelerate", "raw DDP"):
            result = pair.run(version, TINY, warm_up=2)
            assert (result["processes"], result["device"], result["threads"]) == (2, "cpu", 1)
            assert len(result["stamps"]) == 4  # one stamp for each of steps 2 to 5
            assert result["stamps"] == sorted(result["stamps"])
            seconds = result["stamps"][-1] - result["stamps"][0]
            assert result["seconds_per_step"] == pytest.approx(seconds / 3)
        pair.threads = 2
        with pytest.raises(RuntimeError, match="'threads': 2.* but trained with .*'threads': 1"):
            pair.run("Accelerate", TINY)
        # A worker dies. The error contains what it has written to stderr.
        with pytest.raises(RuntimeError, match="the launcher started 2 processes"):
            pair.run("plain PyTorch", TINY)
        started = [worker.pid for worker in pair.workers]
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_a_worker_that_takes_too_long_is_stopped():
    with WorkerPool(1, threads=1, gpus=ON_CPU) as alone:
        with pytest.raises(RuntimeError, match="a worker took over 0.1 s"):
            alone.run("Accelerate", TINY, time_limit=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("speed", "invalid choice: 'speed' (choose from "),
        ("dataparallel --repeats 0", "--repeats must be at least 1, got 0"),
        ("dataparallel --model nonsense", "invalid choice: 'nonsense'"),
        ("dataparallel --global-batch 0", "--global-batch must be a positive even number, got 0"),
        ("dataparallel --global-batch 33", "--global-batch must be a positive even number"),
        ("dataparallel --json {folder}/none/x.json", "cannot write --json {folder}/none/x.json"),
        ("dataparallel --plot {folder}/x.txt", "--plot takes a .png, .svg or .pdf file, got "),
    ],
)
def test_invalid_arguments_print_one_line_before_anything_starts(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(dataparallel, "WorkerPool", None)  # calling it would raise a TypeError
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        bench.main(arguments.format(folder=tmp_path).split())
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1
    assert message.format(folder=tmp_path) in output.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_step_benchmark_prints_and_saves_its_tables(start, tmp_path):
    json_file, plot = tmp_path / "report.json", tmp_path / "report.svg"
    command = ["accel-demo", "bench", "dataparallel", "--quick"]
    result = start([*command, "--json", json_file, "--plot", plot], timeout=200)
    assert result.returncode == 0, result.stderr
    report = json.loads(json_file.read_text())
    assert report["command"] == "bench dataparallel" and report["environment"]["cores"] >= 1
    assert report["facts"]["processes"] == 2
    [table] = report["tables"]
    assert f"{table['title']} (" in result.stdout
    assert [len(row["values"]) for row in table["rows"].values()] == [1, 1, 1]
    assert plot.stat().st_size > 1000

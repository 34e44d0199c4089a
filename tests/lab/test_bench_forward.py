"""`accel-demo bench dataparallel --forward`: what it measures, and on which ranks."""

import json
import threading

import pytest
import torch

from accel_demo.anatomy import gil
from accel_demo.errors import one_line_errors
from accel_demo.lab.bench import command, forward
from accel_demo.lab.bench.forward import DP, ONE, Case, Training


def measured(device, repeats):
    return forward.measure_on_rank(device, "tiny_cnn", 4, repeats)


def test_every_case_is_measured_and_both_ranks_have_the_slowest_times(together):
    first, second = together(measured, 2, repeats=2)
    assert first == second
    seconds, device = first
    assert device == "cpu" and len(seconds) == 6
    for case, measurements in seconds.items():
        assert len(measurements) == 2, case
        assert min(measurements) > 0, case


@pytest.mark.parametrize(
    ("method", "calls"), [(ONE, [("MainThread", 16)]), (DP, [("replica 0", 8), ("replica 1", 8)])]
)
def test_each_thread_runs_the_python_code_for_as_many_images_as_it_gets(method, calls, monkeypatch):
    made = []
    monkeypatch.setattr(
        gil, "preprocess", lambda number: made.append((threading.current_thread().name, number))
    )
    Training(Case(method, has_python=True), "tiny_cnn", 4, torch.device("cpu")).run(1)
    assert sorted(made) == calls
    made.clear()
    Training(Case(method, has_python=False), "tiny_cnn", 4, torch.device("cpu")).run(1)
    assert made == []


def test_more_than_one_thread_per_worker_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        command.main(["dataparallel", "--forward"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --forward needs OMP_NUM_THREADS=1, got 2\n"


@pytest.mark.slow
def test_the_benchmark_prints_and_saves_two_tables(start, tmp_path):
    report = tmp_path / "report.json"
    words = ["accel-demo", "bench", "dataparallel", "--forward", "--quick"]
    result = start([*words, "--model", "tiny_cnn", "--json", report])
    assert result.returncode == 0, result.stderr
    saved = json.loads(report.read_text())
    assert saved["facts"] == {"processes": 2, "device": "cpu"}
    assert len(saved["tables"]) == 2
    assert all(f"{table['title']} (" in result.stdout for table in saved["tables"])
    assert result.stdout.count("DDP is ") == 2

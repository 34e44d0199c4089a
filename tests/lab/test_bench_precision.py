"""Test the settings of `bench precision`, and how it measures memory and compile time."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab.bench import command as bench
from accel_demo.lab.bench import precision, precision_training
from accel_demo.processes.cleanup import kill_all
from tests.conftest import BIN, left_behind, processes_below_this_one


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run `bench precision` for fp32 and bf16, and return its JSON and its picture."""
    folder = tmp_path_factory.mktemp("precision")
    files = {"json": folder / "report.json", "plot": folder / "report.svg"}
    arguments = "precision --repeats 2 --models tiny_cnn --steps 2 --no-compiled"
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert bench.main([*arguments.split(), *options]) == 0
    return {"picture": files["plot"].read_text(), **json.loads(files["json"].read_text())}


def test_each_setting_runs_and_times_the_same_number_of_steps(report):
    runs = report["runs"]["tiny_cnn"]
    assert list(runs) == ["fp32", "bf16"]
    for name, run in runs.items():
        assert len(run["losses"]) == 4
        assert len(run["seconds_per_step"]) == 2 and run["first_step_seconds"] > 0
        speed = [128 / seconds for seconds in run["seconds_per_step"]]
        assert report["tables"][0]["rows"][name]["values"] == pytest.approx(speed)


def test_bf16_has_similar_losses_with_less_memory_and_coarser_logits(report):
    exact, low = report["runs"]["tiny_cnn"].values()
    assert low["losses"] == pytest.approx(exact["losses"], rel=0.02)
    assert low["megabytes"] < exact["megabytes"]
    epsilon = torch.finfo(torch.bfloat16).eps
    assert exact["logits_error"] == 0 and epsilon / 8 < low["logits_error"] < 4 * epsilon


def test_every_table_is_in_the_file_and_the_picture_shows_every_setting(report):
    assert len(report["tables"]) == 4
    assert all(row["values"] for table in report["tables"] for row in table["rows"].values())
    for words in ("images/s", "MB that a step allocates", "loss", "fp32", "bf16", "tiny_cnn"):
        assert words in report["picture"]


def test_the_memory_of_a_step_is_the_size_of_its_tensors(monkeypatch):
    """Replace the training step with one that allocates a single large tensor (4 MB)."""
    training = precision_training.SteppedTraining("tiny_cnn", "no", False, 4)
    training.step = lambda: torch.ones(10**6).sum()
    monkeypatch.setattr(precision_training, "_training", training, raising=False)
    assert 4e6 <= precision_training.bytes_of_a_step() < 4.1e6


def test_compiling_pays_off_when_faster_steps_have_saved_the_compile_time():
    text = precision.price([0.3, 0.3, 0.3], [0.2, 0.2, 0.2], first_step=50.2)
    assert text == "compiling took 50.0 s and saves 100.0 ms per step: it pays off after 500 steps"
    text = precision.price([0.2, 0.2, 0.2], [0.3, 0.3, 0.3], first_step=50.3)
    assert text == "compiling took 50.0 s, and the steps are slower: it never pays off here"
    text = precision.price([0.2, 0.4, 0.2], [0.3, 0.3, 0.3], first_step=50.3)
    assert text == "compiling took 50.0 s, and the steps are not reliably faster"


def test_a_missing_compiler_is_an_error_only_on_a_cpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler .* or add --no-compiled."):
        precision.check_compiler(torch.device("cpu"))
    precision.check_compiler(torch.device("cuda"))


def test_a_large_model_is_compiled_only_on_request():
    for model, no_compiled, compile_large, count in (
        ("small_cnn", False, False, 4),
        ("small_cnn", True, False, 2),
        ("resnet18", False, False, 2),
        ("resnet18", False, True, 4),
    ):
        options = SimpleNamespace(no_compiled=no_compiled, compile_large=compile_large)
        settings = list(precision.settings_for(model, options))
        assert settings == list(precision.SETTINGS)[:count]


def test_stopping_a_busy_worker_also_stops_all_processes_that_it_started():
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt), precision.worker() as executor:
        process = psutil.Process(executor.submit(os.getpid).result())
        executor.submit(subprocess.call, sleeper)  # stands in for a compiler
        while not process.children():
            time.sleep(0.01)
        started = [process, *process.children()]
        process.send_signal(signal.SIGINT)  # what Ctrl-C sends in a terminal
        raise KeyboardInterrupt
    _, left = psutil.wait_procs(started, timeout=30)
    kill_all(left)
    assert len(started) == 2 and not left


def test_sigterm_works_like_ctrl_c(monkeypatch):
    earlier = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(precision, "compare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.main(["precision", "--no-compiled"])
    finally:
        signal.signal(signal.SIGTERM, earlier)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_a_compilation_leaves_neither_processes_nor_files(tmp_path, number):
    before, arguments = processes_below_this_one(), "bench precision --models tiny_cnn"
    process = psutil.Popen(
        [BIN / "accel-demo", *arguments.split()],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    try:
        while "cc1plus" not in {child.name() for child in process.children(recursive=True)}:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130 and "\nstopped\n" in stderr
    finally:
        kill_all([process])
        orphans = left_behind(before)
        process.communicate()
    assert not orphans and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *("--steps 0", "--models nonsense", "--repeats 0", "--stepz 3", "--models"),
        "--no-compiled --compile-large",
    ],
)
def test_invalid_arguments_print_one_line_before_anything_starts(arguments, capsys):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        bench.main(["precision", *arguments.split()])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_and_eager_results_agree_within_rounding_errors(tmp_path):
    """This test runs the real C++ compiler, which is slow."""
    file = tmp_path / "report.json"
    bench.main(f"precision --repeats 1 --models tiny_cnn --steps 2 --json {file}".split())
    report = json.loads(file.read_text())
    eager, bf16, compiled, _ = report["runs"]["tiny_cnn"].values()
    assert compiled["logits_error"] < 1e-3 < bf16["logits_error"]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-3)
    assert compiled["first_step_seconds"] > eager["first_step_seconds"]
    prices = [line for line in report["findings"] if "compiling took" in line]
    assert len(prices) == 2

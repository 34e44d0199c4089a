"""The four ways train the same network on the same images, and compiling is told apart."""

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
from tests.conftest import BIN, kill, left_behind, processes_below_this_one


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `bench precision` writes down of fp32 and bf16."""
    folder = tmp_path_factory.mktemp("precision")
    files = {"json": folder / "found.json", "plot": folder / "found.svg"}
    question = "precision --repeats 2 --models tiny_cnn --steps 2 --no-compiled"
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert bench.main([*question.split(), *options]) == 0
    return {"picture": files["plot"].read_text(), **json.loads(files["json"].read_text())}


def test_each_way_takes_the_same_steps_and_says_what_they_cost(found):
    ways = found["facts"]["tiny_cnn"]
    assert list(ways) == ["fp32", "bf16"]
    for result in ways.values():
        assert result["steps"] == 5 and len(result["losses"]) == 4
        assert len(result["seconds_per_step"]) == 2 and result["first_seconds"] > 0
        speed = [128 / seconds for seconds in result["seconds_per_step"]]
        assert result["images_per_second"] == pytest.approx(speed)


def test_bf16_learns_the_same_with_less_memory_and_coarser_logits(found):
    exact, low = found["facts"]["tiny_cnn"].values()
    assert low["losses"] == pytest.approx(exact["losses"], rel=0.02)
    assert low["megabytes"] < exact["megabytes"]
    epsilon = torch.finfo(torch.bfloat16).eps
    assert exact["logits_off"] == 0 and epsilon / 8 < low["logits_off"] < 4 * epsilon


def test_every_table_is_in_the_file_and_the_picture_shows_every_way(found):
    assert len(found["tables"]) == 4
    assert all(row["values"] for table in found["tables"] for row in table["rows"].values())
    for words in ("images/s", "loss", "first step in s", "fp32", "bf16", "tiny_cnn"):
        assert words in found["picture"]


def test_memory_of_a_step_is_what_its_tensors_take(monkeypatch):
    """A network of one parameter, whose step makes one tensor of 4 MB that is large."""
    training = precision_training.Training("tiny_cnn", "no", False, 4)
    training.step = lambda: torch.ones(10**6).sum()
    monkeypatch.setattr(precision_training, "_training", training, raising=False)
    assert 4e6 <= precision_training.bytes_of_a_step() < 4.1e6


def turns(*seconds: float, first: float = 0.0) -> dict:
    return {"seconds_per_step": list(seconds), "first_seconds": first}


def test_compiling_pays_back_after_as_many_steps_as_it_takes_to_save_its_seconds():
    said = precision.price(turns(0.3, 0.3, 0.3), turns(0.2, 0.2, 0.2, first=50.2))
    assert said == "compiling took 50.0 s, and saves 100.0 ms a step: paid back after 500 steps"
    said = precision.price(turns(0.2, 0.2, 0.2), turns(0.3, 0.3, 0.3, first=50.3))
    assert said == "compiling took 50.0 s, and a step is slower then: it never pays back here"
    said = precision.price(turns(0.2, 0.4, 0.2), turns(0.3, 0.3, 0.3, first=50.3))
    assert said == "compiling took 50.0 s, and a step is not surely faster then"


def test_a_cpu_without_a_compiler_is_a_mistake_found_before_anything_starts(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler .* or add --no-compiled"):
        precision.check_compiler(torch.device("cpu"))
    precision.check_compiler(torch.device("cuda"))


def test_a_large_network_is_compiled_only_where_that_is_asked_for():
    for model, no_compiled, compile_large, count in (
        ("small_cnn", False, False, 4),
        ("small_cnn", True, False, 2),
        ("resnet18", False, False, 2),
        ("resnet18", False, True, 4),
    ):
        options = SimpleNamespace(no_compiled=no_compiled, compile_large=compile_large)
        ways = list(precision.ways_of(model, options))
        assert ways == list(precision.WAYS)[:count]


def test_a_worker_that_is_still_at_work_ends_with_all_that_it_has_started():
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt), precision.worker() as executor:
        process = psutil.Process(executor.submit(os.getpid).result())
        executor.submit(subprocess.call, sleeper)  # as a compiler
        while not process.children():
            time.sleep(0.01)
        started = [process, *process.children()]
        process.send_signal(signal.SIGINT)  # as a terminal does
        raise KeyboardInterrupt
    _, left = psutil.wait_procs(started, timeout=30)
    kill(left)
    assert len(started) == 2 and not left


def test_a_request_to_stop_is_taken_as_ctrl_c(monkeypatch):
    earlier = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(precision, "compare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.main(["precision", "--no-compiled"])
    finally:
        signal.signal(signal.SIGTERM, earlier)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_it_compiles_it_leaves_neither_processes_nor_files(tmp_path, number):
    before, question = processes_below_this_one(), "bench precision --models tiny_cnn"
    process = psutil.Popen(
        [BIN / "accel-demo", *question.split()],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    try:
        while "cc1plus" not in {one.name() for one in process.children(recursive=True)}:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130 and "\nstopped\n" in said
    finally:
        kill([process])
        orphans = left_behind(before)
        process.communicate()
    assert not orphans and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "question",
    [
        *("--steps 0", "--models nonsense", "--repeats 0", "--stepz 3", "--models"),
        "--no-compiled --compile-large",
    ],
)
def test_a_wrong_question_gets_one_line_before_anything_starts(question, capsys):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        bench.main(["precision", *question.split()])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_and_not_give_the_same_to_rounding(tmp_path):
    """With the real compiler, which takes its time."""
    file = tmp_path / "found.json"
    bench.main(f"precision --repeats 1 --models tiny_cnn --steps 2 --json {file}".split())
    report = json.loads(file.read_text())
    ways = report["facts"]["tiny_cnn"]
    assert ways["fp32, compiled"]["logits_off"] < 1e-3 < ways["bf16"]["logits_off"]
    assert ways["fp32, compiled"]["losses"] == pytest.approx(ways["fp32"]["losses"], rel=1e-3)
    assert ways["fp32, compiled"]["first_seconds"] > ways["fp32"]["first_seconds"]
    priced = [line for line in report["findings"] if "compiling took" in line]
    assert len(priced) == 2

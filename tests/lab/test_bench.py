"""Test the worker pool, the timing of the parts of a step, and the step benchmarks."""

import json
import statistics
import subprocess
import sys
import time

import psutil
import pytest
import torch

from accel_demo.config import TrainConfig
from accel_demo.errors import one_line_errors
from accel_demo.lab import step_parts
from accel_demo.lab.bench import command as bench
from accel_demo.lab.bench import limit, overhead
from accel_demo.lab.bench.command import BENCHMARKS
from accel_demo.lab.step_parts import PARTS, timed_parts
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool
from tests.conftest import REPOSITORY

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
        with pytest.raises(RuntimeError, match="the launcher started 2 processes"):
            pair.run("plain PyTorch", TINY)
        started = [worker.pid for worker in pair.workers]
    assert not any(psutil.pid_exists(pid) for pid in started)


@pytest.mark.skipif(not overhead.profiler_counts_all_calls(), reason=overhead.NO_PROFILE)
def test_the_profile_shows_what_accelerate_calls():
    with WorkerPool(1, threads=1, gpus=ON_CPU) as alone:
        profile = alone.run("Accelerate", TINY, watched="profile")
    assert profile["processes"] == 1
    # A training step calls cross_entropy twice, for its loss and for its metrics. An evaluation
    # calls it once, for its metrics.
    steps, evaluations = TINY["max_steps"], 1
    assert profile["counts"]["functional.cross_entropy"] == 2 * steps + evaluations
    assert profile["counts"]["accelerate/accelerator.clip_grad_norm_"] == steps
    calls, seconds = profile["inside"]["accelerate/accelerator.backward: _tensor.backward"]
    assert calls == steps and seconds > 0


def test_the_parts_of_a_step_add_up_to_its_time_in_both_loops():
    with WorkerPool(1, threads=1, gpus=ON_CPU) as alone:
        for version in ("plain PyTorch", "Accelerate"):
            result = alone.run(version, TINY, watched="parts")
            assert len(result["parts"]) == TINY["max_steps"] - 1
            assert all(step.keys() == set(PARTS) for step in result["parts"])
            seconds = sum(sum(step.values()) for step in result["parts"])
            assert seconds == pytest.approx(result["stamps"][-1] - result["stamps"][0], rel=0.05)


def test_a_delay_is_measured_in_the_part_of_the_step_that_contains_it():
    def delay(*_):
        time.sleep(0.02)

    def delay_in_training(*_):
        if torch.is_grad_enabled():
            delay()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, values):
            return values * 1

        @staticmethod
        def backward(context, gradients):
            delay()
            return gradients

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for slow_part in PARTS:
        hook = None
        if slow_part == step_parts.FORWARD:
            hook = model[1].register_forward_hook(delay_in_training)
        if slow_part == step_parts.STEP:
            hook = optimizer.register_step_pre_hook(delay)
        with timed_parts() as steps:
            for _ in range(6):
                delay() if slow_part == step_parts.BEFORE_FORWARD else None
                outputs = model(torch.ones(1, 2))
                with torch.no_grad():
                    model(torch.ones(1, 2))
                loss = outputs.sum()
                delay() if slow_part == step_parts.BEFORE_BACKWARD else None
                loss = Slow.apply(loss) if slow_part == step_parts.BACKWARD else loss
                loss.backward()
                delay() if slow_part == step_parts.BEFORE_STEP else None
                optimizer.step()
        if hook:
            hook.remove()
        assert len(steps) == 5
        medians = {part: statistics.median(step[part] for step in steps) for part in PARTS}
        assert {part for part, seconds in medians.items() if seconds > 0.02} == {slow_part}


def test_a_worker_with_an_unexpected_number_of_threads_is_an_error():
    with WorkerPool(1, threads=1, gpus=ON_CPU) as alone:
        alone.threads = 2
        with pytest.raises(RuntimeError, match="'threads': 2,.* but trained with .*'threads': 1,"):
            alone.run("Accelerate", TINY)


def test_the_error_for_a_worker_that_dies_contains_its_stderr():
    with WorkerPool(1, threads=1, gpus=ON_CPU) as alone:
        with pytest.raises(RuntimeError, match="batch_size must be at least 1, got 0"):
            alone.run("Accelerate", {**TINY, "batch_size": 0})


def test_a_worker_that_takes_too_long_is_stopped():
    with WorkerPool(1, threads=1, gpus=ON_CPU) as alone:
        with pytest.raises(RuntimeError, match="a worker took over 0.1 s"):
            alone.run("Accelerate", TINY, time_limit=0.1)


def test_the_flops_of_a_step_equal_a_count_by_hand():
    """tiny_cnn has two convolutions and a linear layer.

    A product of [m, k] and [k, n] takes 2·m·k·n operations. A layer computes one product in forward
    and two in backward, for the gradients of its weights and of its input. The first convolution
    needs no gradient of its input.
    """
    first, second = 14 * 14 * 8 * 9 * 1, 7 * 7 * 16 * 9 * 8
    linear = 16 * 7 * 7 * 10
    by_hand = 128 * 2 * (2 * first + 3 * second + 3 * linear)
    assert limit.flops_of_step(TrainConfig(model="tiny_cnn")) == by_hand


def test_the_matrix_rate_is_within_a_factor_of_three_of_a_timed_product():
    rate = limit.matrix_rate(torch.float32, torch.device("cpu"))
    a, b = torch.rand(2, 1024, 1024)
    seconds = []
    for _ in range(5):
        started_at = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started_at)
    assert 1 / 3 < rate / (2 * 1024**3 / min(seconds)) < 3


@pytest.mark.parametrize(
    "arguments",
    [
        "scaling --batch-size 0",
        "scaling --model nonsense",
        "scaling --repeats 0",
        "dataparallel --global-batch 0",
        "dataparallel --global-batch 33",
    ],
)
def test_invalid_arguments_print_one_line_before_anything_starts(arguments, capsys):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        bench.main(arguments.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs the malloc of glibc")
def test_keeping_freed_memory_avoids_page_faults():
    def page_faults(first_line: str) -> int:
        program = f"""
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: use 4-KiB pages on every machine
from accel_demo.processes.memory import keep_freed_memory
{first_line}
def allocate():
    for megabytes in (48, 32, 16):
        torch.zeros(megabytes * 2**18)
for _ in range(10):
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
        return int(subprocess.check_output([sys.executable, "-c", program], timeout=60))

    assert page_faults("keep_freed_memory()") < page_faults("") / 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overhead", "scaling", "dataparallel", "optimizer", "limit"])
def test_a_step_benchmark_prints_and_saves_its_tables(name, start, tmp_path):
    json_file, plot = tmp_path / "report.json", tmp_path / "report.svg"
    command = ["accel-demo", "bench", name, "--quick", "--json", json_file, "--plot", plot]
    result = start(command, timeout=200)
    assert result.returncode == 0, result.stderr
    report = json.loads(json_file.read_text())
    assert report["command"] == f"bench {name}" and report["environment"]["cores"] >= 1
    if name == "overhead":
        titles = [table["title"] for table in report["tables"][:4]]
        launches = ["1 process on cpu", "2 processes on cpu"] * 2
        assert [title.partition(", ")[2] for title in titles] == launches
        assert "Where: Accelerate less plain PyTorch" in result.stdout
        has_profile = "Inside: Accelerate's slowest" in result.stdout
        assert has_profile == overhead.profiler_counts_all_calls()
    if name in ("scaling", "dataparallel"):
        assert report["facts"]["processes"] == 2
    for table in report["tables"]:
        assert f"{table['title']} (" in result.stdout
        assert all(row["values"] for row in table["rows"].values())
    assert plot.stat().st_size > 1000


def test_the_introduction_quotes_two_recorded_speeds_of_small_cnn():
    bench = REPOSITORY / "tutorials" / "transcripts" / "bench"
    quoted = {}
    for name, row in (("scaling", "1 process"), ("dataparallel", "plain PyTorch")):
        lines = (bench / f"{name}.txt").read_text().splitlines()
        rates = [line.split("|")[2] for line in lines if line.startswith(f"| {row} ")]
        quoted[name] = int(rates[0].replace(",", "")) / 1000
    introduction = (REPOSITORY / "accel_demo/lab/BENCHMARKS.md").read_text().partition("\n## ")[0]
    one_thread, two_threads = f"{quoted['scaling']:.1f}".replace(".", ","), quoted["dataparallel"]
    assert f"{one_thread}00 images/s in one table (one process with one thread)" in introduction
    assert f"{two_threads:.0f},000 in another (two threads)" in " ".join(introduction.split())


def test_every_benchmark_has_a_recorded_result():
    for name in BENCHMARKS:
        record = REPOSITORY / "tutorials" / "transcripts" / "bench" / f"{name}.txt"
        command, *output = record.read_text().splitlines()
        assert command.split()[:4] == ["$", "accel-demo", "bench", name]
        assert output[-1].startswith("Measured on ") and "90 % interval" in "\n".join(output)

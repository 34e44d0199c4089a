"""Test what `accel-demo scaling` says about the speed-up of any script."""

import json
import re
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from accel_demo.errors import UserError
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.ranks import Rank
from accel_demo.lab.scaling.command import main
from accel_demo.lab.scaling.own import (
    SEVERAL,
    SKIPPED,
    TimedRun,
    check_connected,
    measure_script,
    read_run,
    result_of,
)
from accel_demo.lab.scaling.tables import draw_own, text_of_script
from accel_demo.observer import events, timing
from tests.conftest import run_to_end
from tests.observer.test_checks import observe

# Evaluates after each epoch of 4 steps. The last batch of an epoch is shorter.
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=WORKERS)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
second = torch.optim.SGD(model.parameters(), 0.0)
for epoch in range(100):
    for inputs, targets in loader:
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        second.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for inputs, targets in loader:
            model.module(inputs)
raise SystemExit("the run must end before this line")
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_steps_and_samples_of_a_script_are_recorded_until_the_run_ends(workers, tmp_path):
    script = SCRIPT.replace("WORKERS", str(workers))
    evidence = observe(script, tmp_path, ACCEL_DEMO_TIME="1", ACCEL_DEMO_AUDIT_STEPS="13")
    assert evidence.exit_code == 0, evidence.log
    assert [rank.connected_world for rank in evidence.ranks] == [2, 2]
    for rank in evidence.ranks:
        assert not rank.of("fault")
        assert [step["samples"] for step in rank.steps()] == [8, 8, 8, 6] * 3 + [8]
    run = read_run(evidence)
    assert (run.started, run.connected, run.device, run.threads) == (2, 2, "cpu", 1)
    assert run.samples == 16 and 0 < run.ms_per_step < 1000


def test_the_observer_adds_less_than_a_millisecond_to_a_step(tmp_path, monkeypatch):
    for name, value in {"folder": str(tmp_path), "process": 0, "file": -1}.items():
        monkeypatch.setattr(events._Log, name, value)
    for name, value in {"optimizer": None, "steps": 0, "samples": 0}.items():
        monkeypatch.setattr(timing._Timed, name, value)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    seconds = []
    for _ in range(50):
        started_at = time.perf_counter()
        timing._before_step(optimizer, (), {})
        timing._after_step(optimizer, (), {})
        seconds.append(time.perf_counter() - started_at)
    [recorded] = events.read_events(str(tmp_path))
    assert len([each for each in recorded if each["kind"] == "step"]) == 50
    assert statistics.median(seconds) < 1e-3


# Synthetic runs


def evidence_of(*ms_by_rank: list[float], samples: int = 8, connected: int = 2) -> Evidence:
    """Return what is seen of ranks whose steps take so many milliseconds."""
    ranks = []
    for number, times in enumerate(ms_by_rank):
        about = {"optimizer": 0, "samples": samples, "device": "cpu", "threads": 1}
        recorded = [{"kind": "connected", "world": connected, "rank": number, "time": 0.0}]
        ended_at = 0.0
        for ms in times:
            ended_at += ms / 1000
            recorded.append({"kind": "step", "time": ended_at, **about})
        ranks.append(Rank(number + 1, number, len(ms_by_rank), recorded))
    return Evidence(ranks, 0)


def test_the_step_time_is_the_median_of_the_slowest_rank_without_the_first_steps():
    slow_at_first = [500.0] * SKIPPED
    run = read_run(evidence_of([*slow_at_first, *[10.0] * 6, 90.0], [12.0] * (SKIPPED + 7)))
    assert run.ms_per_step == pytest.approx(12)
    assert (run.samples, run.connected) == (16, 2)
    run = read_run(evidence_of([*slow_at_first, 20.0, 30.0, 40.0, 50.0, 600.0], connected=1))
    assert run.ms_per_step == pytest.approx(40)


def test_a_script_with_too_few_steps_is_an_error_of_one_line():
    with pytest.raises(UserError, match=r"too few optimizer steps .*\(rank 0: 7, rank 1: 7\)"):
        read_run(evidence_of([10.0] * 7, [10.0] * 7))


def runs(*ms: float, processes: int = 2, samples: int = 16, threads: int = 1) -> list[TimedRun]:
    return [TimedRun(processes, processes, "cpu", threads, each, samples) for each in ms]


def compared(several: list[TimedRun], one: list[TimedRun]):
    return result_of(several, one, ["torchrun", "t.py"], ["torchrun", "--one", "t.py"])


def test_the_speed_up_is_that_of_the_samples_per_second_in_each_pair_of_runs(tmp_path):
    one = runs(8, 9, 10, 11, 12, processes=1, samples=8)
    result = compared(runs(10, 10, 16, 20, 20), one)
    first, second = result.rows
    assert second.speedups == pytest.approx([1.6, 1.8, 1.25, 1.1, 1.2])
    assert (first.median_speedup, second.median_speedup) == (1, pytest.approx(1.25))
    assert second.interval == pytest.approx([1.1, 1.8])
    assert second.efficiency == pytest.approx(0.625)
    assert (first.samples_per_second, second.samples_per_second) == (800, 1000)
    assert result.findings == []
    text = text_of_script(result)
    assert "2 connected processes on cpu, 1 thread each: torchrun t.py\n" in text
    assert re.search(r"\| +2 \| 16\.0 +\| 1,000 +\| 1\.25 +\| 1\.10 – 1\.80 +\| 62% ", text)
    assert "Weak scaling, because each process keeps its batch" in text
    draw_own(result, tmp_path / "drawn.svg")
    assert "<!-- your script -->" in (tmp_path / "drawn.svg").read_text()


@pytest.mark.parametrize(
    ("many", "few", "speedup", "words"),
    [
        (16, 8, 1.25, "Weak scaling, because"),
        (8, 8, 0.625, "Strong scaling, because the script divides its batch"),
        (12, 8, 0.9375, "Neither weak nor strong scaling: a step has 12 samples in 2 processes"),
        (0, 0, 1.25, "The table assumes weak scaling"),
    ],
)
def test_it_is_weak_or_strong_scaling_depending_on_the_samples_of_a_step(many, few, speedup, words):
    result = compared(runs(16, samples=many), runs(10, processes=1, samples=few))
    assert result.rows[1].median_speedup == pytest.approx(speedup)
    text = text_of_script(result)
    assert words in " ".join(text.split())
    assert "needs 5 repeats" in text and ("unknown" in text) == (many == 0)


def test_processes_that_share_cores_or_are_slower_than_one_are_named(monkeypatch):
    monkeypatch.setattr("accel_demo.lab.scaling.own.usable_cores", lambda: 2)
    one = runs(*[10] * 5, processes=1, samples=8)
    [finding] = compared(runs(*[25] * 5), one).findings
    assert (finding.kind, finding.text) == ("slower", "2 processes are slower than one")
    [finding] = compared(runs(*[15] * 5, threads=2), one).findings
    assert finding.text == "2 processes with 2 threads each share 2 cores"


def test_processes_that_are_not_connected_have_no_speed_up():
    [alone] = runs(10)
    clones = TimedRun(2, 1, alone.device, 1, 10, 16)
    with pytest.raises(UserError, match="^2 processes, 1 connected, and a speed-up needs at least"):
        check_connected(clones, SEVERAL, ["torchrun", "t.py"])
    with pytest.raises(UserError, match="^the command has started several processes"):
        check_connected(alone, "one process", ["torchrun", "t.py"])


def test_the_runs_are_in_random_order_and_have_equal_threads(monkeypatch):
    started = []

    options = SimpleNamespace(command=["train.py"], processes=2, repeats=8, steps=20)

    def observe_nothing(options, name, limits, read):
        count = 1 if "1" in options.command else 2
        started.append((count, limits.get("OMP_NUM_THREADS")))
        [run] = runs(10, processes=count, samples=8 * count)
        return SimpleNamespace(content=run)

    monkeypatch.setattr("accel_demo.lab.scaling.own.observe", observe_nothing)
    result = measure_script(options)
    assert result.rows[1].speedups == [2.0] * 8
    assert started[0] == (2, None) and {threads for _, threads in started[1:]} == {"1"}
    order = [count for count, _ in started]
    pairs = [order[place : place + 2] for place in range(0, 16, 2)]
    assert all(sorted(pair) == [1, 2] for pair in pairs) and [1, 2] in pairs


@pytest.mark.slow
def test_the_command_measures_a_script_in_two_connected_processes_and_in_one(tmp_path):
    script = SCRIPT.replace("WORKERS", "0").replace(
        "data, 8,", "data, 16 // dist.get_world_size(),"
    )
    (tmp_path / "t.py").write_text(script)
    command = ["accel-demo", "scaling", "--quick", "--steps", "5", "--guess", "2"]
    command += ["--json", "x.json", "--plot", "x.svg", "t.py"]
    ended = run_to_end(command, timeout=100, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 connected processes on cpu, 1 thread each" in ended.stdout
    assert "Your guess: 2×" in ended.stdout
    assert "Strong scaling, because the script divides its batch" in ended.stdout
    result = json.loads((tmp_path / "x.json").read_text())
    assert (result["processes"], result["subject"]) == (2, "script")
    assert [row["processes"] for row in result["rows"]] == [1, 2]
    assert all(row["ms_per_step"][0] > 0 for row in result["rows"])
    assert (tmp_path / "x.svg").stat().st_size > 1000


@pytest.mark.slow
def test_unconnected_processes_are_an_error_of_one_line(tmp_path):
    script = SCRIPT.replace("WORKERS", "0").replace("DistributedDataParallel(", "(")
    alone = 'dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())'
    (tmp_path / "t.py").write_text(
        script.replace('dist.init_process_group("gloo")', alone).replace("model.module", "model")
    )
    ended = run_to_end(["accel-demo", "scaling", "t.py"], timeout=100, cwd=tmp_path)
    assert ended.returncode == 2
    assert "error: 2 processes, 1 connected, and a speed-up needs at least 2" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model vgg11 SCRIPT", "--model is only for our training loops: leave it out"),
        ("--rate 50mbit -- python SCRIPT", "--rate is only for our training loops"),
        ("--keep", "--keep is only for your script"),
        ("--steps 4 SCRIPT", "--steps must be at least 5, got 4"),
        ("--processes 1,2 SCRIPT", "invalid int value: '1,2'"),
        ("-- python SCRIPT", "scaling must choose the number of processes"),
        ("none.py", "there is no file none.py"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.replace("SCRIPT", __file__).split())

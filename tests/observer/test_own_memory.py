"""Test what `accel-demo memory` measures of a script, and what it calculates for more devices."""

import json
from statistics import median

import pytest

from accel_demo.errors import UserError
from accel_demo.lab.memory.command import main
from accel_demo.lab.memory.own import LEAST_GROWTH, growth_of, result_of
from tests.conftest import REPOSITORY, run_to_end
from tests.observer.test_checks import observe

MIB = 2**20
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(),
    torch.nn.Linear(2048, 512)))
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(2048, 512)
for step in range(12):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("the run must end before this line")
"""
PARAMETERS = 4 * (512 * 2048 + 2048 + 2048 * 512 + 512)
# ReLU's output (also the second layer's input) and the model's output, which `square` saves
ACTIVATIONS = 4 * 2048 * (2048 + 512)


def test_what_a_script_holds_is_measured_on_each_rank(tmp_path):
    evidence = observe(SCRIPT, tmp_path, ACCEL_DEMO_MEMORY="5")
    result = result_of(evidence, ["train.py"], 8)
    assert (result.processes, result.device, result.optimizers) == (2, "cpu", ["AdamW"])
    for rank in result.ranks:
        assert rank.steps == 5 and rank.growth == 0
        kinds = rank.kinds
        assert kinds["parameters"] == kinds["gradients"] == kinds["buckets"] == PARAMETERS
        assert kinds["optimizer state"] == pytest.approx(2 * PARAMETERS, rel=0.001)
        assert kinds["activations"] == pytest.approx(ACTIVATIONS, rel=0.1)
        # backward also holds the gradients of activations
        assert ACTIVATIONS < rank.in_step < 3 * ACTIVATIONS
    ddp, zero_1, zero_2, fsdp = result.strategies
    assert ddp.peak == pytest.approx(result.ranks[0].peak, rel=0.001)
    assert ddp.peak - zero_1.peak == pytest.approx(2 * PARAMETERS * 7 / 8, rel=0.001)
    assert ddp.peak > zero_1.peak > zero_2.peak > fsdp.peak - fsdp.kinds["gathered blocks"]
    assert fsdp.kinds["parameters"] == PARAMETERS / 8
    assert fsdp.kinds["gathered blocks"] == 3 * 4 * (512 * 2048 + 2048)


def test_memory_that_grows_in_nearly_each_step_is_named_and_noise_is_not():
    step = 2 * LEAST_GROWTH
    assert growth_of([MIB + n * step for n in range(8)]) == step
    assert growth_of([MIB] * 8) == growth_of([MIB, MIB + step] * 4) == 0
    assert growth_of([MIB + step * (n > 3) for n in range(8)]) == 0
    assert growth_of([MIB, MIB + step]) == 0, "too few steps"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", ["", "--sgd", "--checkpointing", "--sgd --checkpointing"])
def test_one_process_predicts_the_memory_of_two_within_10_percent(options, tmp_path):
    def run(processes: int, *more: str) -> dict:
        words = ["accel-demo", "memory", "--quick", "--json", tmp_path / "x.json"]
        words += ["--processes", processes, REPOSITORY / "tests/lab/planted/two_towers.py"]
        ended = run_to_end([*words, *options.split(), *more], timeout=100, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        result = json.loads((tmp_path / "x.json").read_text())
        assert result["processes"] == processes
        return result

    predicted = {each["strategy"]: each["peak"] for each in run(1)["strategies"]}
    for strategy, flags in (("DDP", []), ("ZeRO-3, FSDP2", ["--fsdp"])):
        ranks = run(2, *flags)["ranks"]
        lasting = "parameters", "optimizer state", "buckets"
        peaks = [sum(rank["kinds"][kind] for kind in lasting) + rank["in_step"] for rank in ranks]
        assert predicted[strategy] == pytest.approx(median(peaks), rel=0.1), strategy


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--batch-size 5 SCRIPT", "--batch-size is about our own models: leave it out"),
        ("--devices 4", "--devices is about your own script"),
        ("--devices 1 SCRIPT", "--devices must be from 2 to 100000, got 1"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.replace("SCRIPT", __file__).split())

"""Test what `accel-demo memory` measures of a script, and what it calculates for more devices."""

import json
from statistics import median

import pytest
import torch

from accel_demo.errors import UserError
from accel_demo.lab.memory.command import main
from accel_demo.lab.memory.own import (
    KINDS,
    LEAST_GROWTH,
    RankMemory,
    as_text,
    bytes_per_parameter,
    findings_of,
    growth_of,
    predict,
    result_of,
)
from accel_demo.lab.observed.ranks import Rank
from accel_demo.observer.memory import graph_nodes
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
FROZEN = """
import copy
teacher = copy.deepcopy(model.module).requires_grad_(False)
model.module[0].requires_grad_(False)
model = DistributedDataParallel(model.module)
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
    assert result.parameters == PARAMETERS / 4
    assert bytes_per_parameter(result) == pytest.approx(20, rel=0.001), "AdamW and DDP's buckets"
    assert fsdp.kinds["gathered blocks"] == 4 * (2 * (512 * 2048 + 2048) + 2048 * 512 + 512)


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_sharded_model_is_measured_without_a_loader(tmp_path):
    result = result_of(observe(SHARDED, tmp_path, ACCEL_DEMO_MEMORY="5"), ["x"], 4)
    layer = 4 * (256 * 256 + 256)
    assert result.processes == 2 and result.parameters == layer
    for rank in result.ranks:
        assert rank.steps == 5
        assert rank.kinds["parameters"] == rank.kinds["gradients"] == 2 * layer
    fsdp = result.strategies[-1]
    assert fsdp.kinds["gathered blocks"] == 4 * layer - 2 * layer // 4


def test_a_frozen_model_has_no_gradients_and_a_teacher_is_counted_apart(tmp_path):
    script = SCRIPT.replace("optimizer = ", FROZEN + "optimizer = ")
    [rank, _] = result_of(observe(script, tmp_path, ACCEL_DEMO_MEMORY="5"), ["x"], 2).ranks
    assert rank.kinds["parameters"] == rank.kinds["other models"] == PARAMETERS
    assert rank.kinds["gradients"] == rank.kinds["buckets"] == 4 * (2048 * 512 + 512)


def test_gradients_that_are_views_of_the_buckets_are_counted_once(tmp_path):
    script = SCRIPT.replace("512)))", "512)), gradient_as_bucket_view=True)")
    result = result_of(observe(script, tmp_path, ACCEL_DEMO_MEMORY="5"), ["train.py"], 2)
    [rank, _], [ddp, *_] = result.ranks, result.strategies
    assert result.processes == 2
    for kinds in (rank.kinds, ddp.kinds):
        assert kinds["gradients"] == 0 and kinds["buckets"] == PARAMETERS
    assert ddp.peak == pytest.approx(rank.peak, rel=0.001)
    assert "The gradients are views of the buckets" in as_text(result)


STATE = {
    "all_parameters": 100, "all_gradients": 100, "gradients": 100, "trained": 100,
    "is_sharded": False, "view_of_buckets": False, "blocks": [[0, 60, 40, 0]],
}  # fmt: skip


def predicted(*states: dict) -> dict[str, dict]:
    """Return the kinds of each strategy for 2 devices, from what the ranks record."""
    memory = RankMemory(0, dict.fromkeys(KINDS, 0), in_step=100, growth=0, steps=1)
    rank = Rank(1, 0, 2, [{"kind": "memory", "backwards": 1}])
    found = predict(rank, [STATE | each for each in states], memory, 2)
    return {each.strategy: each.kinds for each in found}


def test_the_optimizer_state_of_zero_is_that_of_all_ranks():
    zero = predicted({"whole_states": [80, 0]}, {"whole_states": [0, 120]})
    ddp = predicted(*[{"whole_states": [80, 120]}] * 2)
    for each in (zero, ddp):
        assert each["DDP"]["optimizer state"] == 200
        assert each["ZeRO-1"]["optimizer state"] == 100
    different = predicted({"whole_states": [80]}, {"whole_states": [0, 120]})
    assert different["DDP"]["optimizer state"] == 80, "the ranks train different parameters"


def test_fsdp_gathers_no_more_than_the_blocks_of_a_model_and_one_gradient():
    def gathered(gradients: int, *blocks: int) -> int:
        state = {"whole_states": [], "all_gradients": gradients, "blocks": [blocks]}
        return predicted(state)["ZeRO-3, FSDP2"]["gathered blocks"]

    assert gathered(100, 0, 60, 40, 0) == 60 + 40 + 60
    assert gathered(100, 0, 100, 0, 0) == 200, "one block: its parameters and its gradients"
    assert gathered(10, 0, 60, 40, 0) == 60 + 40 + 10, "nearly all parameters are frozen"
    assert gathered(100, 50, 25, 25, 0) == 50 + 25 + 25 + 25, "an embedding stays gathered"
    assert gathered(60, 0, 10, 10, 10) == 40 - 20 // 2, "without the shards of two gradients"


def test_zero_2_and_fsdp_divide_gradients_that_ddp_keeps_in_its_buckets():
    found = predicted({"whole_states": [], "view_of_buckets": True})
    gradients = {strategy: (each["gradients"], each["buckets"]) for strategy, each in found.items()}
    assert gradients["DDP"] == gradients["ZeRO-1"] == (0, 100)
    assert gradients["ZeRO-2"] == gradients["ZeRO-3, FSDP2"] == (50, 0)


def test_kept_graphs_are_named_only_if_the_graph_grows():
    def finding(keeps_graph: bool) -> str:
        kinds = dict.fromkeys(KINDS, 0)
        [found] = findings_of([RankMemory(0, kinds, 0, LEAST_GROWTH, 9, keeps_graph)])
        return found.text

    assert "such as losses without .detach()" in finding(True)
    assert "but autograd's graph does not" in finding(False)


def test_the_nodes_of_the_graph_are_counted_while_a_tensor_keeps_them():
    before, weight = graph_nodes(), torch.ones(2, requires_grad=True)
    total = (2 * weight).sum()
    assert graph_nodes() == before + 3  # with that which adds to the gradient
    total = total + total.square()
    assert graph_nodes() == before + 5
    del total
    assert graph_nodes() == before


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


@pytest.mark.slow
def test_losses_that_page_42_lets_a_reader_collect_are_named(tmp_path):
    text = (REPOSITORY / "tutorials/42_train.py").read_text()
    text = text.replace("for (batch,) in loader:", "losses = []\n    for (batch,) in loader:")
    text = text.replace("    loss.backward()", "    losses.append(loss)\n        loss.backward()")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "encoder.py").write_text((REPOSITORY / "tutorials/encoder.py").read_text())
    command = ["accel-demo", "memory", "--processes", "2", tmp_path / "train.py"]
    ended = run_to_end(command, 200, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 connected processes" in ended.stdout
    assert "keeps tensors with their graph" in " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--batch-size 5 SCRIPT", "--batch-size is only for our models: leave it out"),
        ("--model vgg11 SCRIPT", "--model is only for our models: leave it out"),
        ("--timeout 600", "--timeout is only for your script"),
        ("--devices 4", "--devices is only for your script"),
        ("--devices 1 SCRIPT", "--devices must be from 2 to 100000, got 1"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.replace("SCRIPT", __file__).split())

"""Page 43: FSDP by hand and FSDP2, sharded checkpoints, and models split in other ways."""

import copy
import re
from math import isclose

import pytest
import torch
import torch.distributed as dist
from sharded import Sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from accel_demo.anatomy.model_parallel import splits
from tests.pages.pages import TUTORIALS, bound_to, load_module, rows_below, section

FSDP = load_module(TUTORIALS / "43_fsdp.py")
PAGE = TUTORIALS / "43_fsdp.md"
TEXT = " ".join(PAGE.read_text().split())


def blocks() -> dict[str, list[float]]:
    """Map each method to the blocks that it holds: after the optimizer, in forward, in backward."""
    return {row[0]: list(map(float, row[1:4])) for row in rows_below(PAGE, "bytes in blocks")}


def test_a_rank_of_fsdp_holds_its_half_and_three_blocks():
    held = blocks()
    assert held["one process"][0] == held["DDP"][0] == 24
    for method in ("FSDP by hand", "FSDP2"):
        after, forward, backward = held[method]
        assert after == 12
        assert 0 < forward - 9 < 2.2
        assert 2 < backward - after <= 3
    assert held["FSDP2"][2] - held["FSDP by hand"][2] == 0.5
    assert f"In backward, it holds {held['FSDP2'][2]:.0f} at most." in TEXT


def peaks_of_six_blocks(device):
    """Return the blocks that FSDP2 needs in addition, and how many modules are sharded."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = torch.nn.Sequential(*(FSDP.Block() for _ in range(FSDP.BLOCKS)))
    size = sum(weight.nbytes for weight in model[0].parameters())
    model = FSDP.fsdp2(model)
    sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
    held = FSDP.train(model, torch.randn(2, 1, FSDP.WIDTH))
    return dist.get_world_size(), sharded, (held["backward"] - held["after the optimizer"]) / size


@pytest.mark.parametrize("processes", [2, 4])
def test_fsdp2_needs_four_blocks_less_two_shards_in_addition(together, processes):
    for connected, sharded, more in together(peaks_of_six_blocks, processes):
        assert connected == processes and sharded == FSDP.BLOCKS + 1
        assert more == pytest.approx(4 - 2 / processes, abs=0.15)
    assert "it's 4 − 2/N units more than the 24/N" in TEXT


def different_weights(device):
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(layer.weight, 1.0 + dist.get_rank())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return fully_shard(layer, mesh=mesh).weight.full_tensor()[:, 0].tolist()


def test_fully_shard_cuts_the_weights_of_each_rank(together):
    assert together(different_weights, 2) == [[1, 1, 2, 2]] * 2


def test_all_methods_compute_the_weights_of_one_process():
    verdicts = [row[4] for row in rows_below(PAGE, "bytes in blocks")]
    assert verdicts == ["–", *["those of one process, but for rounding"] * 3]


def shard_odd_blocks(device):
    """Return the difference to one process for blocks that no number of ranks divides evenly."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(2))).double()
    sharded = torch.nn.Sequential(*(Sharded(copy.deepcopy(layer)) for layer in whole))
    batch = torch.randn(6, 7, dtype=torch.float64)
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    for model, inputs in ((whole, batch), (sharded, own)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = [
        (block.weights(block.gather())[name], weight)
        for block, layer in zip(sharded, whole, strict=True)
        for name, weight in layer.named_parameters()
    ]
    return dist.get_world_size(), max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_fsdp_by_hand_equals_one_process_also_with_padding(together, processes):
    for connected, difference in together(shard_odd_blocks, processes):
        assert connected == processes and difference < 1e-13


def test_a_checkpoint_of_two_ranks_is_loaded_into_three():
    text = PAGE.read_text()
    one = r"rank \d stores ([\d,]+) elements of (.*) …; after another step: (.*) …"
    ranks = re.findall(one, text)
    assert "save in 2 processes" in text and "load in 3 processes" in text and len(ranks) == 5
    [(now, after)] = {each[1:] for each in ranks}
    assert now != after
    stored = [int(count.replace(",", "")) for count, *_ in ranks]
    assert sum(stored[:2]) == sum(stored[2:]) == 6 * (64 * 64 + 64)


def bytes_per_parameter() -> list[list[str]]:
    lines = section(PAGE.read_text(), "What ZeRO divides").splitlines()
    rows = [[c.strip() for c in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def test_the_totals_in_the_table_of_zero_stages_are_the_sums_of_the_parts():
    rows = bytes_per_parameter()
    assert len(rows) == 4
    for row in rows:
        *parts, total, with_8 = (
            float(eval(cell, {"N": 8}))
            for cell in row[1:]  # formulas such as "8 + 8 / N"
        )
        assert isclose(sum(parts), total) and isclose(total, with_8)


def test_the_answers_are_right():
    assert f"16 × 3 = {16 * 3} GB" in TEXT and f"{16 * 3} / 4 = {16 * 3 / 4:g} GB" in TEXT
    block = 4 * 3 / 30
    assert f"A block has 4 × 3 / 30 = {block:g} GB of weights, so that's {3.5 * block:g} GB" in TEXT
    assert f"{12 + 3.5 * block:g} GB in all" in TEXT
    for microbatches, share in ((8, "3/11"), (32, "3/35")):
        logs = [
            [(kind, piece) for kind in ("forward", "backward") for piece in range(microbatches)]
        ] * 4
        assert str(splits.bubble(splits.timetable(logs))) == share
        assert f"3 / ({microbatches} + 3) = {share}" in TEXT


def shard_in_two_wrong_ways(device):
    """Return the whole weights after forward, and whether a late `fully_shard` trains."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = fully_shard(splits.make_model(), mesh=mesh)  # only the whole model
    model(splits.whole_numbers((2, splits.WIDTHS[0]), 0))
    after = splits.elements(model)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 1
    late = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(late.parameters(), lr=1.0)
    fully_shard(late, mesh=mesh)
    before = late.weight.full_tensor().detach().clone()
    late(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return after, torch.equal(before, late.weight.full_tensor())


def test_sharding_only_the_whole_model_gathers_it_and_an_early_optimizer_changes_nothing(together):
    for after, is_unchanged in together(shard_in_two_wrong_ways, 2):
        assert after == 768
        assert is_unchanged
        assert "then gathered at once, and stay until `backward` is done." in TEXT


ON_A_CPU = """
import sys

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Linear"],
    activation_checkpointing=True,
    cpu_offload=True,
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)


def say(text):  # one write, because torchrun passes -u, and print would write the end separately
    sys.stdout.write(f"{text}\\n")


say(type(accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))).__name__)
say(f"policy: {FullyShardedDataParallelPlugin(fsdp_version=2).auto_wrap_policy}")
"""


def test_accelerate_ignores_fsdp_on_a_cpu(start, tmp_path):
    bound_to("accelerate", PAGE.name, "Accelerate {version} silently ignores the plugin there")
    program = tmp_path / "on_a_cpu.py"
    program.write_text(ON_A_CPU)
    result = start(["torchrun", "--nproc-per-node", 2, program])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("DistributedDataParallel\n") == 2
    assert result.stdout.count("policy: None\n") == 2

"""Page 42: the memory budget, and what Accelerate and PyTorch do with a split model."""

from math import isclose

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_demo.anatomy.model_parallel import splits
from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from tests.pages.pages import TUTORIALS, bound_to, rows_below

PAGE = TUTORIALS / "42_when_it_does_not_fit.md"
TEXT = " ".join(PAGE.read_text().split())


def memory_rows() -> dict[str, list[dict[str, int]]]:
    """Map each strategy to the bytes on its ranks."""
    kinds = ["parameters", "gradients", "state", "buckets", "gathered", "total", "stays"]
    ranks = {}
    for strategy, _, *sizes in rows_below(PAGE, "strategy"):
        ranks.setdefault(strategy, []).append(dict(zip(kinds, map(int, sizes), strict=True)))
    return ranks


def test_adamw_needs_16_bytes_per_parameter_and_the_buckets_of_ddp_4_more():
    parameters = [p.numel() for p in make_model(TrainConfig(model="small_cnn")).parameters()]
    count, ranks = sum(parameters), memory_rows()
    assert f"has {count:,} parameters, and 16 × {count:,} = {16 * count:,} bytes" in TEXT
    assert ranks["one process"][0]["total"] == 16 * count
    assert ranks["DDP"][0]["total"] == 20 * count
    assert ranks["DDP, gradients as bucket views"][0]["total"] == 16 * count
    assert f"take {4 * count / 1e3:.0f} kB" in TEXT
    assert f"needs {16 * count / 1e3:,.0f} kB" in TEXT
    zero = ranks["the same, ZeRO optimizer"]
    assert zero[0]["state"] > zero[1]["state"]


def test_a_rank_of_fsdp_needs_its_half_and_the_largest_layer():
    [one], ranks = memory_rows()["one process"], memory_rows()["FSDP2"]
    for rank in ranks:
        assert rank["total"] - rank["gathered"] == one["total"] / 2
        assert f"a total of {rank['total']:,} bytes" in TEXT
        assert f"which is {rank['total'] / one['total']:.0%} of {one['total']:,}" in TEXT
        assert f'{rank["gathered"]:,} bytes in the "gathered" column' in TEXT
    elements = {row[0]: row[1:] for row in rows_below(PAGE, "when")}
    assert elements["before forward"] == elements["after forward"] == ["384", "384"]
    assert elements["inside forward, at most"] == [str(384 + 768 // 4)] * 2


def test_the_totals_in_the_table_of_zero_stages_are_the_sums_of_the_parts():
    rows = rows_below(PAGE, "bytes per parameter")
    assert len(rows) == 4
    for row in rows:
        *parts, total, with_8 = (
            float(eval(cell, {"N": 8}))
            for cell in row[1:]  # formulas such as "8 + 8 / N"
        )
        assert isclose(sum(parts), total) and isclose(total, with_8)


def test_the_measured_bytes_match_the_table_of_zero_stages_on_two_ranks():
    [one] = memory_rows()["one process"]
    count = one["total"] / 16
    zero, fsdp = memory_rows()["the same, ZeRO optimizer"], memory_rows()["FSDP2"]
    assert sum(rank["total"] for rank in zero) / 2 == (8 + 8 / 2) * count
    assert all(rank["total"] - rank["gathered"] == 16 / 2 * count for rank in fsdp)


def test_the_answers_are_right():
    assert f"16 × 3 = {16 * 3} GB" in TEXT and f"{16 * 3} / 4 = {16 * 3 / 4:g} GB" in TEXT
    assert f"{4 * 100e6 / 1e9} GB more" in TEXT
    for microbatches, share in ((8, "3/11"), (32, "3/35")):
        logs = [
            [(kind, piece) for kind in ("forward", "backward") for piece in range(microbatches)]
        ] * 4
        assert str(splits.bubble(splits.timetable(logs))) == share
        assert f"3 / ({microbatches} + 3) = {share}" in TEXT


def shard_in_two_wrong_ways(device):
    """Return the elements inside and after forward, and whether a late `fully_shard` trains."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = fully_shard(splits.make_model(), mesh=mesh)  # only the whole model
    shards, inside = splits._local(model), []
    model[0].register_forward_pre_hook(lambda *_: inside.append(splits.elements(model, shards)))
    model(splits.whole_numbers((2, splits.WIDTHS[0]), 0))
    after = splits.elements(model)
    late = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(late.parameters(), lr=1.0)
    fully_shard(late, mesh=mesh)
    before = late.weight.full_tensor().detach().clone()
    late(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return inside, after, torch.equal(before, late.weight.full_tensor())


def test_sharding_only_the_whole_model_gathers_it_and_an_early_optimizer_changes_nothing(together):
    for inside, after, is_unchanged in together(shard_in_two_wrong_ways, 2):
        assert (inside, after) == ([384 + 768], 768)
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

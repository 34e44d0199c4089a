"""Page 37: when compiling pays off, graphs, and the places to compile a model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.exc import GPUTooOldForTriton
from torch.nn.parallel import DistributedDataParallel

from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from tests.pages.pages import TUTORIALS, bound_to, rows_below, table_rows, transcript

PAGE = "37_compilation.md"


def test_compiling_wins_with_small_operations_and_not_with_matrix_products():
    [output] = transcript("pays_off").values()
    rows = rows_below(TUTORIALS / PAGE, "network")
    assert [row[0] for row in rows] == ["many small operations", "few large ones"]
    assert all(f"| {row[0]}" in output for row in rows)
    (small_low, _), (_, large_high) = [map(float, row[3].split(" – ")) for row in rows]
    assert small_low > 1.1 and large_high < 1.1
    assert rows[0][5].endswith(" steps") and rows[1][5] == "never"


def test_a_graph_break_cuts_a_network_and_fullgraph_makes_it_an_error():
    rows = {row[0]: row[1:] for row in rows_below(TUTORIALS / PAGE, "statement")}
    graphs = {name: int(count) for name, (count, _) in rows.items()}
    assert graphs.pop("only operations on tensors") == 1 and min(graphs.values()) > 1
    refused = [name for name, (_, result) in rows.items() if result.startswith("`Unsupported: ")]
    assert refused == ["`print`", "`if` on a tensor's value"]


def test_in_ddp_the_graph_is_cut_if_its_first_run_is_there():
    rows = [row[1:] for row in rows_below(TUTORIALS / PAGE, "order")]
    (alone, _), (before, buckets), (after, _) = [map(int, row) for row in rows]
    assert alone == 1 and before == after and before - buckets in (0, 1)


def test_triton_needs_what_the_grader_and_the_page_say():
    """The page says that Triton needs compute capability 7.0 and a C compiler, not a C++ one."""
    shown = str(GPUTooOldForTriton(SimpleNamespace(name="GPU", major=6, minor=1), None))
    assert "Triton only supports devices of CUDA Capability >= 7.0" in shown
    triton = Path(torch.__file__).parent.parent / "triton"
    if triton.exists():
        assert "Failed to find C compiler" in (triton / "runtime" / "build.py").read_text()
        assert "driver.c" in [path.name for path in (triton / "backends" / "nvidia").iterdir()]


def test_the_page_shows_when_graphs_are_compiled_and_how_weights_are_named():
    graphs = [row for row in table_rows(PAGE, cells=3) if row[0].endswith(" images")]
    assert [row[1] for row in graphs] == ["1", "1", "1", "2", "3", "3", "3"]
    assert {row[2] for row in graphs} == {"3"}
    names = dict(row for row in table_rows(PAGE, cells=2))
    for method in ("`model.compile()`, then `prepare`", "`prepare`, then `model.compile()`"):
        assert names[method] == "`0.weight`"
    for method in ("`torch.compile(model)`, then `prepare`", "`Accelerator(dynamo_backend=…)`"):
        assert names[method] == "`_orig_mod.0.weight`"


def test_compiling_ddp_around_a_plain_sequential_captures_no_graph():
    bound_to("torch", PAGE, "In PyTorch {version}, `torch.compile(ddp)` silently compiles nothing")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphs = []
    for is_compiled_first in (True, False):
        torch._dynamo.reset()
        counters.clear()
        network = torch.nn.Sequential(torch.nn.Linear(2, 2))
        if is_compiled_first:
            network.compile(backend="eager")
        ddp = DistributedDataParallel(network)
        model = ddp if is_compiled_first else torch.compile(ddp, backend="eager")
        model(torch.ones(1, 2))
        graphs.append(counters["stats"]["unique_graphs"])
    dist.destroy_process_group()
    assert graphs == [1, 0]


def test_weights_saved_from_a_compiled_model_do_not_fit_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    saved = torch.compile(model, backend="eager").state_dict()
    with pytest.raises(RuntimeError, match="Missing key\\(s\\) in state_dict"):
        model.load_state_dict(saved)


def test_growing_batches_need_two_graphs():
    torch._dynamo.reset()
    counters.clear()
    model = make_model(TrainConfig(model="tiny_cnn"))
    model.compile(backend="eager")
    for size in range(24, 34):
        model(torch.rand(size, 1, 28, 28))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    ("last_layer", "evaluates", "needs_gradients", "graphs"),
    [
        (torch.nn.ReLU(), True, True, 1),
        (torch.nn.ReLU(), False, False, 2),
        (torch.nn.BatchNorm1d(3), True, True, 2),
        (torch.nn.Dropout(), True, True, 2),
    ],
)
def test_evaluation_needs_another_graph_without_gradients_or_with_batch_norm_or_dropout(
    last_layer, evaluates, needs_gradients, graphs
):
    torch._dynamo.reset()
    counters.clear()
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), last_layer)
    model.compile(backend="eager")
    model(torch.rand(4, 3))
    model.train(not evaluates)
    with torch.set_grad_enabled(needs_gradients):
        model(torch.rand(4, 3))
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_without_a_compiler_torch_prints_the_recorded_error(start):
    recorded = (TUTORIALS / "transcripts" / "no_compiler.txt").read_text()
    command, *said = recorded.splitlines()
    result = start(command.removeprefix("$ ").split())
    assert result.returncode == 0 and result.stdout.splitlines() == said
    assert "InvalidCxxCompiler: No working C++ compiler found" in said[0]

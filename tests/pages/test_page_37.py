"""Page 37: when compiling pays off, graphs, and the places to compile a model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import GPUTooOldForTriton

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
    orders = {row[0]: row[1:] for row in rows_below(TUTORIALS / PAGE, "order")}
    alone, before, after = (
        [[*map(int, cell.split(", "))] for cell in row] for row in orders.values()
    )
    layers = sum(alone[0])
    assert alone[0] == [layers] and before == after and len(before[0]) > 1
    assert all(sum(part) == layers for order in (alone, before) for part in order)


def test_after_wrapping_a_sequential_is_not_compiled_and_names_depend_on_the_method():
    bound_to("torch", PAGE, "PyTorch {version} silently compiles nothing")
    rows = {row[0]: row[1:] for row in rows_below(TUTORIALS / PAGE, "method")}
    graphs = {name: row[:2] for name, row in rows.items()}
    assert graphs.pop("not compiled") == ["0", "0"]
    assert [*graphs.values()] == [["1", "1"]] * 2 + [["1", "0"]] * 3
    for name, (*_, in_model, by_accelerate) in rows.items():
        renames = "torch.compile" in name or "dynamo" in name
        assert by_accelerate == ("`_orig_mod.0.weight`" if renames else "`0.weight`")
        assert ("_orig_mod." in in_model) == renames and "module." in in_model


def test_after_eight_graphs_nothing_more_is_compiled():
    rows = rows_below(TUTORIALS / PAGE, "steps so far")
    assert rows == [["4", "4"], ["8", "8"], ["12", "8"]]
    assert torch._dynamo.config.recompile_limit == 8


def test_triton_needs_what_the_grader_and_the_page_say():
    """The page says that Triton needs compute capability 7.0 and a C compiler, not a C++ one."""
    shown = str(GPUTooOldForTriton(SimpleNamespace(name="GPU", major=6, minor=1), None))
    assert "Triton only supports devices of CUDA Capability >= 7.0" in shown
    triton = Path(torch.__file__).parent.parent / "triton"
    if triton.exists():
        assert "Failed to find C compiler" in (triton / "runtime" / "build.py").read_text()
        assert "driver.c" in [path.name for path in (triton / "backends" / "nvidia").iterdir()]


def test_the_page_shows_when_graphs_are_compiled():
    graphs = [row for row in table_rows(PAGE, cells=3) if row[0].endswith(" images")]
    assert [row[1] for row in graphs] == ["1", "1", "1", "2", "3", "3", "3"]
    assert {row[2] for row in graphs} == {"3"}


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

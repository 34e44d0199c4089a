"""Page 33: the measurements and the exercise on mixed precision and compilation."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from torch._inductor.exc import GPUTooOldForTriton
from torch.nn.parallel import DistributedDataParallel

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.models import make_model
from tests.exercises.wrong_answers import edited
from tests.pages.pages import (
    EXERCISES,
    FIELD,
    TUTORIALS,
    bound_to,
    load_grader,
    mistake_in,
    rows_below,
    table_rows,
)

PAGE = "33_precision_and_compilation.md"
ANSWER = EXERCISES / "answers" / "33_precision_setting.py"
PRECISION = 'precision = "bf16" if machine["bf16_instructions"] else "no"'
WRONG = [  # (text in the model answer, replacement, part of the grader's message)
    (PRECISION, 'precision = "bf16"', "bf16 is emulated on this CPU"),
    (PRECISION, 'precision = "no"', "this CPU computes faster in bf16 than in fp32"),
    ("(8, 0), capability >= (7, 0)", "(8, 0), True", "fp16 is not faster on a GPU without tensor"),
    ("(8, 0), capability >= (7, 0)", "(8, 0), False", "this GPU has tensor cores"),
    (">= (8, 0)", ">= (9, 9)", "9.0, for 35,121 steps: fp16 works, but bf16 is as fast"),
    ('precision == "fp16"', "False", "fp16 needs a scaler: without one, gradients below"),
    ('machine["steps"] * saved', 'machine["steps"] * abs(saved)', "compiled steps are slower here"),
    ("can_compile and", "can_compile and False and", "but compiling takes"),
    ('machine["has_cxx_compiler"]', 'machine["has_c_compiler"]', "the error InvalidCxxCompiler"),
    ('machine["has_cxx_compiler"]', "False", "and the compiled steps save"),
    ('"compile": can', '"compiled": can', "instead of a dictionary with mixed_precision, grad"),
    ("can_compile and pays_back", "None", "compile must be True or False, not None"),
    ('"bf16" if machine["bf16', '"fp8" if not machine["bf16', "one of no, fp16, bf16, not 'fp8'"),
    (
        'machine["device"]',
        'machine["gpu"]',
        "a CPU without bf16 instructions, for 5,696 steps: setting raises KeyError: 'gpu'",
    ),
]


@pytest.fixture(scope="module")
def grader():
    return load_grader("33")


def test_the_grader_distinguishes_typical_mistakes(grader, tmp_path):
    right = ANSWER.read_text()
    assert mistake_in(grader, ANSWER) == ""
    for number, (truth, lie, said) in enumerate(WRONG):
        answer = tmp_path / f"wrong_{number}.py"
        answer.write_text(edited(right, truth, lie))
        assert said in mistake_in(grader, answer), (truth, lie)


def test_the_unsolved_exercise_fails_because_its_fp16_ran_in_float32(grader):
    bound_to("accelerate", PAGE, "Accelerate {version} silently trains in fp32 there")
    AcceleratorState._reset_state(reset_partial_state=True)
    said = mistake_in(grader, EXERCISES / "33_precision_setting.py")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert said.startswith("a CPU without bf16 instructions, for 5,696 steps: fp16 is for GPUs.")
    assert said.endswith("with this setting a layer returns float32")


def test_the_machines_of_the_exercise_have_every_setting_and_are_clear_or_at_the_limit(
    grader,
):
    machines = grader.machines()
    assert machines == grader.machines()
    rights = {tuple(grader.right_setting(machine).values()) for machine in machines}
    precisions = [("no", False), ("fp16", True), ("bf16", False)]
    assert rights == {(*both, compiled) for both in precisions for compiled in (True, False)}
    for machine in machines:
        saved = grader.saved_seconds(machine) / machine["compile_seconds"]
        assert saved == 1 or not 0.7 < saved < 1.5


def test_triton_needs_what_the_grader_and_the_page_say():
    """The page says that Triton needs compute capability 7.0 and a C compiler, not a C++ one."""
    shown = str(GPUTooOldForTriton(SimpleNamespace(name="GPU", major=6, minor=1), None))
    assert "Triton only supports devices of CUDA Capability >= 7.0" in shown
    triton = Path(torch.__file__).parent.parent / "triton"
    if triton.exists():
        assert "Failed to find C compiler" in (triton / "runtime" / "build.py").read_text()
        assert "driver.c" in [path.name for path in (triton / "backends" / "nvidia").iterdir()]


def test_the_page_shows_layers_that_return_bfloat16_but_no_tensor_kept_in_it():
    layers = [row for row in table_rows(PAGE, cells=3) if row[1] in ("float32", "bfloat16")]
    assert [row for row in layers if row[0] in ("`Conv2d`", "`Linear`")] == [
        ["`Conv2d`", "float32", "bfloat16"],
        *[["`Conv2d`", "bfloat16", "bfloat16"]] * 2,
        ["`Linear`", "bfloat16", "bfloat16"],
    ]
    assert ["`cross_entropy`", "float32", "float32"] in layers
    kept = [row for row in table_rows(PAGE, cells=3) if row[0] in ("weights", "gradients", "AdamW")]
    assert kept == [
        ["weights", "11", "float32"],
        ["gradients", "11", "float32"],
        ["AdamW", "33", "float32"],
    ]
    tensors = sum(int(row[1]) for row in kept)
    text = (TUTORIALS / PAGE).read_text()
    assert "Connected processes: 2" in text
    assert f"Tensors in bfloat16 afterwards: 0 of {tensors}" in text


def test_the_page_shows_that_only_a_hook_halves_the_bytes_of_gradients():
    sent = [row for row in table_rows(PAGE, cells=4) if row[1].endswith(" weights")]
    assert [[row[0], row[3]] for row in sent] == [["none", "4"], ["`BF16`", "2"]]
    without, halved = (int(row[2].replace(",", "")) for row in sent)
    assert without == 2 * halved


def test_the_page_shows_the_number_formats_as_torch_defines_them():
    rows = {row[0]: row[1:] for row in table_rows(PAGE, cells=6)}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bits, significand, epsilon, *_ = rows[str(dtype).removeprefix("torch.")]
        assert int(bits) == torch.finfo(dtype).bits
        assert 2.0 ** (1 - int(significand)) == torch.finfo(dtype).eps
        assert epsilon.startswith(f"2^-{int(significand) - 1} ≈ ")
    assert rows["float16"][3:] == ["6e-08", f"{torch.finfo(torch.float16).max:,.0f}"]


def test_the_page_shows_that_small_gradients_vanish_only_in_fp16():
    rows = {row[0]: row[1:] for row in table_rows(PAGE, cells=5)}
    assert rows["1e-03"] == ["kept"] * 4
    assert rows["1e-08"] == ["kept", "kept", "0: lost", "kept"]


def test_the_page_shows_that_bf16_halves_activations_but_not_weights():
    shares = {row[0]: row[3] for row in table_rows(PAGE, cells=4)}
    assert shares["activations for backward"] == "0.51"
    for kind in ("weights", "gradients", "AdamW's state", "indices of max pooling"):
        assert shares[kind] == "1.00"
    [copies] = [row[2] for row in table_rows(PAGE, cells=4) if row[0] == "copies of weights"]
    layers = [weight for weight in make_model(TrainConfig()).parameters() if weight.dim() > 1]
    assert int(copies.replace(",", "")) == 2 * sum(weight.numel() for weight in layers)


def test_the_page_shows_that_torch_runs_fp16_on_a_cpu_in_float32_and_the_train_files_refuse_it():
    rows = {row[0]: row[1:] for row in table_rows(PAGE, cells=4)}
    assert rows["no"][0] == rows["fp16"][0] == "float32" and rows["bf16"][0] == "bfloat16"
    assert rows["fp16"][1] == "none" and rows["fp16"][2] == "stop with an error"


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


def test_the_page_quotes_the_error_for_fp16_weights_and_a_scaler():
    model, scaler = torch.nn.Linear(2, 2).half(), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2).half()).float().sum()).backward()
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the page quotes the message)
        scaler.step(torch.optim.SGD(model.parameters()))
    assert f"`ValueError: {refused.value}`" in (TUTORIALS / PAGE).read_text()
    model.float()
    model.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(1, 2)).float().sum()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss).backward()
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}
    scaler.step(torch.optim.SGD(model.parameters()))


def test_unscale_raises_an_error_the_second_time_unless_the_factor_was_updated(start, tmp_path):
    result = start(["python", FIELD / "c18_unscale.py"])
    message = "unscale_() has already been called on this optimizer since the last update()."
    assert result.stdout.splitlines() == ["0 ok", f"1 RuntimeError: {message}"], result.stderr
    script = edited((FIELD / "c18_unscale.py").read_text(), "unscale_(o)", "unscale_(o), s.step(o)")
    (tmp_path / "script.py").write_text(edited(script, "s.step(o)", "s.step(o), s.update()"))
    assert start(["python", tmp_path / "script.py"]).stdout.splitlines() == ["0 ok", "1 ok"]


def test_the_page_shows_that_only_unscaling_each_optimizer_is_right_for_two_models():
    rows = rows_below(TUTORIALS / PAGE, "after `accelerator.backward`")
    error, *others = [row[1:] for row in rows]
    assert error[0].startswith("`RuntimeError: unscale_() has already been called")
    assert others == [["right", "÷ 65,536"], ["right", "÷ 65,536"], ["right", "right"]]


def test_accelerate_sets_what_the_program_about_unscaling_sets():
    source = inspect.getsource(Accelerator.__init__)
    assert "self.native_amp = True" in source and "self.scaler = get_grad_scaler(" in source
    assert 'self.native_amp and self.mixed_precision == "fp16"' in inspect.getsource(
        Accelerator.unscale_gradients
    )


def test_the_scaler_doubles_its_factor_after_2000_steps_without_infinite_gradients():
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_growth_interval() == 2000 and scaler.get_growth_factor() == 2
    assert scaler.get_backoff_factor() == 0.5 and scaler.get_scale() == 65_536


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


def test_a_bf16_weight_of_1_does_not_change_by_small_updates():
    rounded, exact = torch.ones((), dtype=torch.bfloat16), torch.ones(())
    for _ in range(100):
        rounded += 0.001
        exact += 0.001
    assert rounded == 1 and exact.item() == pytest.approx(1.1, abs=1e-4)


def test_tf32_is_on_by_default_only_in_convolutions():
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def test_the_page_shows_both_changes_to_the_script_of_page_11():
    added = [line for line in (TUTORIALS / PAGE).read_text().splitlines() if line[:2] == "+ "]
    assert len(added) == 2
    assert 'mixed_precision="bf16", **options' in added[0] and "model.compile()" in added[1]


def test_the_recorded_benchmark_is_as_the_page_describes_it():
    recorded = (TUTORIALS / "transcripts" / "bench" / "precision.txt").read_text()
    small, large = recorded.split("\nresnet18, 32 images")[:2]
    ratio = {
        label: float(line.split("|")[4])
        for label, line in ((line.split("|")[1].strip(), line) for line in small.splitlines()[5:9])
    }
    assert ratio["bf16"] > 1.1 and ratio["fp32, compiled"] < 1 and ratio["bf16, compiled"] < 1
    low, _, high = large.splitlines()[5].split("|")[5].split()
    assert float(low) < 1 < float(high)  # not reliably faster
    pattern = r"^(\w+): logits of the same weights differ from fp32's by (\S+) \(bf16\)"
    bf16 = {name: float(size) for name, size in re.findall(pattern, recorded, re.MULTILINE)}
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    small, large = (f"{bf16[name]:.0%} (`{name}`)" for name in ("small_cnn", "resnet18"))
    assert f"the logits differ from fp32's by about {small} and {large}" in text
    [compiled] = re.findall(r"\(bf16\), (\S+) \(fp32, compiled\)", recorded)
    assert float(compiled) < bf16["small_cnn"] / 100


@pytest.mark.slow
def test_without_a_compiler_torch_prints_the_recorded_error(start):
    recorded = (TUTORIALS / "transcripts" / "no_compiler.txt").read_text()
    command, *said = recorded.splitlines()
    result = start(command.removeprefix("$ ").split())
    assert result.returncode == 0 and result.stdout.splitlines() == said
    assert "InvalidCxxCompiler: No working C++ compiler found" in said[0]


def test_train_plain_rejects_fp16_on_a_cpu(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError) as refused:
        train_plain.main(config, "fp16")
    rows = {row[0]: row[3] for row in table_rows(PAGE, cells=4)}
    assert rows["fp16"] == "stop with an error"
    assert str(refused.value).startswith("fp16 needs a GPU")
    assert not (tmp_path / "run").exists()

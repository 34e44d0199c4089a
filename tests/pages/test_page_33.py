"""Page 33: the measurements and the exercise on mixed precision."""

import inspect
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

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
    transcript,
)

PAGE = "33_precision.md"
ANSWER = EXERCISES / "answers" / "33_precision_setting.py"
PRECISION = 'precision = "bf16" if machine["bf16_instructions"] else "no"'
WRONG = [  # (text in the model answer, replacement, part of the grader's message)
    (PRECISION, 'precision = "bf16"', "bf16 is emulated on this CPU"),
    (PRECISION, 'precision = "no"', "this CPU computes faster in bf16 than in fp32"),
    ("(8, 0), capability >= (7, 0)", "(8, 0), True", "fp16 is not faster on a GPU without tensor"),
    ("(8, 0), capability >= (7, 0)", "(8, 0), False", "this GPU has tensor cores"),
    (">= (8, 0)", ">= (9, 9)", "capability 9.0: fp16 works, but bf16 is as fast"),
    ('precision == "fp16"', "False", "fp16 needs a scaler: without one, gradients below"),
    ('"grad_scaler": pre', '"scaler": pre', "instead of a dictionary with mixed_precision, grad"),
    ('precision == "fp16"}', "None}", "grad_scaler must be True or False, not None"),
    ('"bf16" if machine["bf16', '"fp8" if not machine["bf16', "one of no, fp16, bf16, not 'fp8'"),
    (
        'machine["device"]',
        'machine["gpu"]',
        "a CPU without bf16 instructions: setting raises KeyError: 'gpu'",
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
    assert said.startswith("a CPU without bf16 instructions: fp16 is for GPUs.")
    assert said.endswith("with this setting a layer returns float32")


def test_the_machines_of_the_exercise_have_every_setting(grader):
    rights = {tuple(grader.right_setting(machine).values()) for machine in grader.machines()}
    assert rights == {("no", False), ("fp16", True), ("bf16", False)}


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


def test_the_page_shows_that_only_one_optimizer_is_always_right_for_two_models():
    rows = rows_below(TUTORIALS / PAGE, "after `accelerator.backward`")
    error, *others = [row[1:] for row in rows]
    assert error[0].startswith("`RuntimeError: unscale_() has already been called")
    assert others == [
        ["right", "÷ 65,536", "÷ 131,072"],
        ["right", "÷ 65,536", "÷ 131,072"],
        ["right", "right", "÷ 2"],
        ["right", "right", "right"],
    ]


def test_neighboring_bf16_numbers_near_a_typical_weight_are_as_far_apart_as_the_page_says():
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    following = torch.nextafter(weight, torch.ones_like(weight))
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    assert f"near 0.02, bf16 numbers are {(following - weight).item():.5f} apart" in text


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


def test_a_bf16_weight_of_1_does_not_change_by_small_updates():
    rounded, exact = torch.ones((), dtype=torch.bfloat16), torch.ones(())
    for _ in range(100):
        rounded += 0.001
        exact += 0.001
    assert rounded == 1 and exact.item() == pytest.approx(1.1, abs=1e-4)


def test_tf32_is_on_by_default_only_in_convolutions():
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def test_the_page_shows_the_change_to_the_script_of_page_11():
    [added] = [line for line in (TUTORIALS / PAGE).read_text().splitlines() if line[:2] == "+ "]
    assert 'mixed_precision="bf16", **options' in added


def test_the_recorded_benchmark_is_as_the_page_describes_it():
    [recorded] = transcript("bench/precision").values()
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    assert "This CPU has no bf16 instructions." in recorded.splitlines()
    small, large = map(float, re.findall(r"^\| bf16 .* \| ([\d.]+) \| .*$", recorded, re.MULTILINE))
    slower = f"{1 / small:.0f} times with `small_cnn` and {1 / large:.0f} times with `resnet18`"
    assert f"{slower} in the recording" in text
    pattern = r"^(\w+): logits of the same weights differ from fp32's by (\S+) \(bf16\)"
    bf16 = {name: float(size) for name, size in re.findall(pattern, recorded, re.MULTILINE)}
    small, large = (f"{bf16[name]:.0%} (`{name}`)" for name in ("small_cnn", "resnet18"))
    assert f"the logits differ from fp32's by about {small} and {large}" in text


def losses(output: str) -> dict[str, list[list[float]]]:
    """Return {learning rate and precision: lowest and highest accuracy, and share of weights}."""
    cells = [line.strip("| ").split(" | ") for line in output.splitlines() if line[-1:] == "|"]
    ranges = {f"{row[0]} {row[1].strip()}": row[2:] for row in cells[2:]}
    return {
        name: [[float(end.strip(" %")) for end in cell.split(" – ")] for cell in row]
        for name, row in ranges.items()
    }


def test_bf16_weights_lose_accuracy_at_a_low_learning_rate_and_autocast_does_not():
    [output] = transcript("lost").values()
    assert set(output.splitlines()) <= set((TUTORIALS / PAGE).read_text().splitlines())
    accuracy = {name: row[0] for name, row in losses(output).items()}
    changed = {name: row[1] for name, row in losses(output).items()}
    for rate in ("0.001", "0.0001"):
        exact, autocast = accuracy[f"{rate} fp32"], accuracy[f"{rate} bf16 autocast"]
        assert autocast[0] < exact[1] and exact[0] < autocast[1], "the ranges overlap"
        assert min(changed[f"{rate} fp32"] + changed[f"{rate} bf16 autocast"]) > 99
    assert accuracy["0.001 bf16 everywhere"][1] > accuracy["0.001 fp32"][0]
    assert accuracy["0.0001 bf16 everywhere"][1] < accuracy["0.0001 fp32"][0]
    assert changed["0.0001 bf16 everywhere"][1] < 20 < 50 < changed["0.001 bf16 everywhere"][0]


@pytest.mark.pages
def test_bf16_weights_lose_accuracy_on_this_machine_too(start):
    found = losses(start(["python", "tutorials/33_lost.py"], timeout=300).stdout)
    everywhere, exact = found["0.0001 bf16 everywhere"], found["0.0001 fp32"]
    assert everywhere[0][1] < exact[0][0] and everywhere[1][1] < 20


def test_train_plain_rejects_fp16_on_a_cpu(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError) as refused:
        train_plain.main(config, "fp16")
    rows = {row[0]: row[3] for row in table_rows(PAGE, cells=4)}
    assert rows["fp16"] == "stop with an error"
    assert str(refused.value).startswith("fp16 needs a GPU")
    assert not (tmp_path / "run").exists()

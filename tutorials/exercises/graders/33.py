"""Grade exercise 33: check the settings for eight machines, and train with the first setting.

python tutorials/exercises/graders/33.py FILE
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accel_demo.lab.grading import Wrong, grade, import_answer

KEYS = ("mixed_precision", "grad_scaler", "compile")
PRECISIONS = ("no", "fp16", "bf16")
GPU = {"device": "cuda", "bf16_instructions": False, "has_compiler": False}
CPU = {"device": "cpu", "compute_capability": None, "is_bf16_supported": False}
LONG = {"steps": 100_000, "compile_seconds": 60.0}  # compilation pays off after 3,000 steps
LONG |= {"seconds_per_step": 0.1, "seconds_per_step_compiled": 0.08}
SHORT = {**LONG, "steps": 10}
SLOWER = {**LONG, "seconds_per_step_compiled": 0.11}
LAPTOP = {**CPU, "bf16_instructions": False, "has_compiler": True, **SLOWER}


def gpu(capability: tuple[int, int], is_bf16_supported: bool, run: dict) -> dict:
    return {**GPU, "compute_capability": capability, "is_bf16_supported": is_bf16_supported, **run}


MACHINES = {  # name: (machine, expected precision, needs a scaler, should be compiled)
    "a laptop without bf16 instructions": (LAPTOP, "no", False, False),
    "a GPU from 2018, for ten steps": (gpu((7, 5), True, SHORT), "fp16", True, False),
    "a recent GPU, for a long run": (gpu((9, 0), True, LONG), "bf16", False, True),
    "a server's CPU with bf16 instructions": (
        {**LAPTOP, **LONG, "bf16_instructions": True},
        *("bf16", False, True),
    ),
    "a CPU without a compiler": ({**LAPTOP, **LONG, "has_compiler": False}, "no", False, False),
    "a GPU from 2016, without tensor cores": (gpu((6, 1), True, LONG), "no", False, True),
    "a GPU from 2017": (gpu((7, 0), False, LONG), "fp16", True, True),
    "a GPU from 2020": (gpu((8, 0), True, SLOWER), "bf16", False, False),
}
RIGHT = f"{len(MACHINES)} machines, and the training loss on the laptop decreases"


def observe(answer: Path) -> Iterator[dict]:
    """Check the settings. Yield the results of a training run with the first setting."""
    module = import_answer(answer)
    settings = {name: module.setting(dict(machine)) for name, (machine, *_) in MACHINES.items()}
    first = next(iter(settings.values()))
    run = train(first["mixed_precision"]) if has_precision(first) else {}
    yield run
    for name, (machine, *right) in MACHINES.items():
        try:
            judge_setting(machine, right, settings[name], run)
        except Wrong as mistake:
            raise Wrong(f"{name}: {mistake}") from None
    if not run["loss_falls"]:
        raise Wrong(f"the training loss on the laptop does not decrease: {run}")
    for name, (_, precision, _, is_compiled) in MACHINES.items():
        parsed = parsed_by_accelerate(settings[name])
        if parsed != [precision, "INDUCTOR" if is_compiled else "NO"]:
            raise Wrong(f"{name}: Accelerate reads {parsed} from a config file with this setting")


def judge_setting(machine: dict, right: list, setting, run: dict) -> None:
    if not isinstance(setting, dict) or set(setting) != set(KEYS):
        raise Wrong(f"setting returns {setting!r}, instead of a dictionary with {', '.join(KEYS)}")
    precision, has_scaler, is_compiled = (setting[key] for key in KEYS)
    if not has_precision(setting):
        raise Wrong(f"mixed_precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    for key in KEYS[1:]:
        if not isinstance(setting[key], bool):
            raise Wrong(f"{key} must be True or False, not {setting[key]!r}")
    right_precision, needs_scaler, should_compile = right
    if precision != right_precision:
        raise Wrong(wrong_precision(machine, right_precision, precision, run))
    if needs_scaler and not has_scaler:
        raise Wrong("fp16 without a scaler: gradients below 6e-8 become zero. Scale the loss")
    if has_scaler and not needs_scaler:
        raise Wrong(f"a scaler for {precision}, which has the range of fp32 and needs no scaling")
    if is_compiled != should_compile:
        raise Wrong(wrong_compile(machine, is_compiled))


def wrong_precision(machine: dict, right: str, precision: str, run: dict) -> str:
    if machine["device"] == "cpu":
        if precision == "fp16":
            dtype = run.get("dtype", "float32")
            return (
                "fp16 is for GPUs. On a CPU Accelerate silently trains without it: in a run with "
                f"your setting the first layer returned {dtype}"
            )
        if precision == "bf16":
            return "bf16 without bf16 instructions: torch emulates it, and is slower than in fp32"
        return "bf16 instructions are unused: this CPU computes faster in bf16 than in fp32"
    if precision == "bf16":
        return (
            "bf16 on an old GPU: below compute capability 8.0 it is emulated. is_bf16_supported() "
            "includes emulation, unless you pass including_emulation=False"
        )
    if right == "no":
        return "fp16 without tensor cores (below compute capability 7.0) is not faster"
    if precision == "no":
        return f"tensor cores are unused: this GPU computes faster in {right} than in fp32"
    return "fp16 works, but bf16 is as fast here, has the range of fp32, and needs no scaler"


def wrong_compile(machine: dict, is_compiled: bool) -> str:
    saved = machine["seconds_per_step"] - machine["seconds_per_step_compiled"]
    if not is_compiled:
        steps = machine["compile_seconds"] / saved
        return f"not compiled, but it pays back after {steps:,.0f} of {machine['steps']:,} steps"
    if machine["device"] == "cpu" and not machine["has_compiler"]:
        return "compiled for a CPU without a C++ compiler: this would fail with InvalidCxxCompiler"
    if saved <= 0:
        return "compiled, although the compiled step is slower here: measure before you choose"
    return (
        f"compiled for {machine['steps']} steps: that saves {saved * machine['steps']:.1f} s and "
        f"costs {machine['compile_seconds']:.0f} s"
    )


def has_precision(setting) -> bool:
    return isinstance(setting, dict) and setting.get("mixed_precision") in PRECISIONS


def train(precision: str) -> dict:
    """Train tiny_cnn on real images for 15 steps, with Accelerate on the CPU."""
    import torch
    from accelerate import Accelerator

    from accel_demo.config import TrainConfig
    from accel_demo.data import load_datasets
    from accel_demo.models import make_model

    config = TrainConfig(model="tiny_cnn")
    torch.manual_seed(0)
    accelerator, dtypes, losses = Accelerator(cpu=True, mixed_precision=precision), [], []
    network = make_model(config)
    network[0].register_forward_hook(lambda layer, inputs, output: dtypes.append(output.dtype))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(network, optimizer)
    images, labels = load_datasets(config)[0].__getitems__(list(range(128)))
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dtype = str(dtypes[0]).removeprefix("torch.")
    return {"dtype": dtype, "loss_falls": losses[-1] < 0.9 * losses[0]}


def parsed_by_accelerate(setting: dict) -> list[str]:
    """Return the precision and compiler that Accelerate reads from a config with this setting."""
    from accelerate.commands.config.config_args import load_config_from_file

    backend = "INDUCTOR" if setting["compile"] else "NO"
    lines = ['distributed_type: "NO"', f'mixed_precision: "{setting["mixed_precision"]}"']
    lines += ["dynamo_config:", f'  dynamo_backend: "{backend}"']
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text("\n".join(lines) + "\n")
        config = load_config_from_file(str(file))
    return [config.mixed_precision, config.dynamo_config["dynamo_backend"]]


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT))

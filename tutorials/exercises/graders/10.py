"""Grade exercise 10: judge the settings for eight machines, and train with the one for a CPU.

python tutorials/exercises/graders/10.py FILE
"""

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
from pathlib import Path

from accel_demo.processes.launch import run_to_end

TIME_LIMIT = 110  # seconds; without a mistake it takes under ten
PRECISIONS = ("no", "fp16", "bf16")
GPU = {"device": "cuda", "bf16_instructions": False, "has_compiler": False}
CPU = {"device": "cpu", "compute_capability": None, "is_bf16_supported": False}
LONG = {"steps": 100_000, "compile_seconds": 60.0}  # pays back after 3,000 steps
LONG |= {"seconds_per_step": 0.1, "seconds_per_step_compiled": 0.08}
SHORT = {**LONG, "steps": 10}
SLOWER = {**LONG, "seconds_per_step_compiled": 0.11}
LAPTOP = {**CPU, "bf16_instructions": False, "has_compiler": True, **SLOWER}


def gpu(capability: tuple[int, int], is_bf16_supported: bool, run: dict) -> dict:
    return {**GPU, "compute_capability": capability, "is_bf16_supported": is_bf16_supported, **run}


MACHINES = {  # name: the machine, and the right answer: precision, scaler, compile
    "a laptop without bf16 instructions": (LAPTOP, "no", False, False),
    "a GPU of 2018, for ten steps": (gpu((7, 5), True, SHORT), "fp16", True, False),
    "a GPU of today, for a long run": (gpu((9, 0), True, LONG), "bf16", False, True),
    "a server's CPU with bf16 instructions": (
        {**LAPTOP, **LONG, "bf16_instructions": True},
        *("bf16", False, True),
    ),
    "a CPU without a compiler": ({**LAPTOP, **LONG, "has_compiler": False}, "no", False, False),
    "a GPU of 2016, without tensor cores": (gpu((6, 1), True, LONG), "no", False, True),
    "a GPU of 2017": (gpu((7, 0), False, LONG), "fp16", True, True),
    "a GPU of 2020": (gpu((8, 0), True, SLOWER), "bf16", False, False),
}


def main(answer: Path) -> int:
    """Say what is wrong with the answer; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        command = ["python", "tutorials/exercises/graders/10.py", str(answer)]
        result = run_to_end(shlex.join([*command, "--report", str(file)]), TIME_LIMIT)
        report = json.loads(file.read_text()) if file.exists() else None
    if result.returncode is None:
        mistake = f"no answer within {TIME_LIMIT} s: is there a loop without an end?"
    elif report is None:
        mistake = f"the file ended before its time\n{result.stderr}".rstrip()
    else:
        mistake = judge(report)
    if mistake:
        print(f"wrong: {mistake}")
        return 1
    print(f"right: {len(MACHINES)} machines, and the loss of the laptop's training falls")
    return 0


def judge(report: dict) -> str:
    """What is wrong, in a sentence, or nothing."""
    if "unusable" in report:
        return f"the file cannot be used: {report['unusable']}"
    for name, (machine, *right) in MACHINES.items():
        given = report["settings"][name]
        if mistake := judge_setting(machine, right, given, report["run"]):
            return f"{name}: {mistake}"
    if not report["run"].get("loss_falls"):
        return f"the laptop's training does not learn: {report['run']}"
    for name, (_, precision, _, compiled) in MACHINES.items():
        if report["read"][name] != [precision, "INDUCTOR" if compiled else "NO"]:
            return f"{name}: Accelerate reads {report['read'][name]} from a config file of it"
    return ""


def judge_setting(machine: dict, right: list, given, run: dict) -> str:
    keys = ("mixed_precision", "grad_scaler", "compile")
    if not isinstance(given, dict) or set(given) != set(keys):
        return f"setting gives {given!r}, instead of a dictionary with {', '.join(keys)}"
    precision, scaler, compiled = (given[key] for key in keys)
    if precision not in PRECISIONS:
        return f"mixed_precision is one of {', '.join(PRECISIONS)}, not {precision!r}"
    for key in keys[1:]:
        if not isinstance(given[key], bool):
            return f"{key} is True or False, not {given[key]!r}"
    return (
        judge_precision(machine, right[0], precision, run)
        or judge_scaler(right[1], scaler, precision)
        or judge_compile(machine, right[2], compiled)
    )


def judge_precision(machine: dict, right: str, given: str, run: dict) -> str:
    if given == right:
        return ""
    if machine["device"] == "cpu":
        if given == "fp16":
            dtype = run.get("dtype", "float32")
            return (
                "fp16 is for GPUs. On a CPU Accelerate does not say so, and trains without: in a "
                f"run of yours the first layer gave {dtype}"
            )
        if given == "bf16":
            return "bf16 without bf16 instructions: torch emulates it, and is slower than in fp32"
        return "bf16 instructions lie idle: this CPU computes faster in bf16 than in fp32"
    if given == "bf16":
        return (
            "bf16 on an old GPU: below compute capability 8.0 it is emulated. is_bf16_supported() "
            "counts that too, unless you ask with including_emulation=False"
        )
    if right == "no":
        return "fp16 without tensor cores (below compute capability 7.0) gains no speed"
    if given == "no":
        return f"tensor cores lie idle: this GPU computes faster in {right} than in fp32"
    return "fp16 works, but bf16 is as fast here, has the range of fp32, and needs no scaler"


def judge_scaler(right: bool, given: bool, precision: str) -> str:
    if given == right:
        return ""
    if right:
        return "fp16 without a scaler: gradients below 6e-8 become zero. Scale the loss"
    return f"a scaler for {precision}: it has the range of fp32, and nothing needs scaling"


def judge_compile(machine: dict, right: bool, given: bool) -> str:
    if given == right:
        return ""
    saved = machine["seconds_per_step"] - machine["seconds_per_step_compiled"]
    if not given:
        pays = machine["compile_seconds"] / saved
        return f"not compiled: it pays back after {pays:,.0f} of {machine['steps']:,} steps"
    if machine["device"] == "cpu" and not machine["has_compiler"]:
        return "compiled for a CPU without a C++ compiler: it would end with InvalidCxxCompiler"
    if saved <= 0:
        return "compiled, although the compiled step is slower here: measure before you choose"
    return (
        f"compiled for {machine['steps']} steps: that saves {saved * machine['steps']:.1f} s and "
        f"costs {machine['compile_seconds']:.0f} s"
    )


def watch(answer: Path) -> dict:
    """The settings, what a training with the first one does, what Accelerate reads of each."""
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        settings = {name: module.setting(dict(machine)) for name, (machine, *_) in MACHINES.items()}
        json.dumps(settings)
    except (Exception, SystemExit) as error:
        return {"unusable": f"{type(error).__name__}: {error}"}
    usable = {name: given for name, given in settings.items() if is_usable(given)}
    first = usable.get(next(iter(MACHINES)))
    return {
        "settings": settings,
        "run": train(first["mixed_precision"]) if first else {},
        "read": {name: as_accelerate_reads_it(given) for name, given in usable.items()},
    }


def is_usable(given) -> bool:
    """Whether there is a precision in it that a training can be started with."""
    return isinstance(given, dict) and given.get("mixed_precision") in PRECISIONS


def train(precision: str) -> dict:
    """Some steps of tiny_cnn on the CPU, on real images, as Accelerate makes them."""
    import torch
    from accelerate import Accelerator

    from accel_demo.config import TrainConfig
    from accel_demo.data import load_datasets
    from accel_demo.models import make_model

    config = TrainConfig(model="tiny_cnn")
    torch.manual_seed(0)
    accelerator, gave, losses = Accelerator(cpu=True, mixed_precision=precision), [], []
    network = make_model(config)
    network[0].register_forward_hook(lambda layer, inputs, output: gave.append(output.dtype))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(network, optimizer)
    images, labels = load_datasets(config)[0].__getitems__(list(range(128)))
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dtype = str(gave[0]).removeprefix("torch.")
    return {"dtype": dtype, "loss_falls": losses[-1] < 0.9 * losses[0]}


def as_accelerate_reads_it(given: dict) -> list[str]:
    """The precision and the compiler in a config file of this setting, by Accelerate's parser."""
    from accelerate.commands.config.config_args import load_config_from_file

    backend = "INDUCTOR" if given.get("compile") else "NO"
    lines = ['distributed_type: "NO"', f'mixed_precision: "{given["mixed_precision"]}"']
    lines += ["dynamo_config:", f'  dynamo_backend: "{backend}"']
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text("\n".join(lines) + "\n")
        config = load_config_from_file(str(file))
    return [config.mixed_precision, config.dynamo_config["dynamo_backend"]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="run the answer, and write what was seen here")
    options = parser.parse_args()
    if options.report:
        options.report.write_text(json.dumps(watch(options.answer)))
    else:
        sys.exit(main(options.answer.resolve()))

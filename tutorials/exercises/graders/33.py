"""Grade exercise 33: check the settings for many machines."""

import random
import sys
from itertools import product
from pathlib import Path

from grading import Wrong, grade, import_answer, naming_errors, prefixed, torch

KEYS = ("mixed_precision", "grad_scaler", "compile")
PRECISIONS = ("no", "fp16", "bf16")
CAPABILITIES = [(9, 0), (7, 5), (6, 1), (7, 0), (8, 0), (5, 2), (8, 6), (8, 9), (10, 0), (12, 0)]
RUNS = ("slower", "short", "break-even", "long")  # compiling pays off only in a long run
SEED = 33
COMPILERS = {"has_c_compiler": "C", "has_cxx_compiler": "C++"}
# Headings of page 33
ON_GPUS, PAYS_OFF, MISTAKES = "On GPUs", "When compiling pays off", "Common mistakes"
SCALING, FASTER_BF16 = "Why fp16 needs loss scaling", "When bf16 is faster"


def machines() -> list[dict]:
    """Return machines with all combinations of devices, compilers and runs.

    The numbers of each run are random, but the same in every check.
    """
    draw = random.Random(SEED)
    cpu = {"device": "cpu", "compute_capability": None, "is_bf16_supported": False}
    # Every GPU can at least emulate bf16, so torch.cuda.is_bf16_supported() is True for all.
    gpu = {"device": "cuda", "bf16_instructions": False, "is_bf16_supported": True}
    cpus = [{**cpu, "bf16_instructions": has_bf16} for has_bf16 in (False, True)]
    devices = [*cpus, *({**gpu, "compute_capability": capability} for capability in CAPABILITIES)]
    compilers = [dict(zip(COMPILERS, has, strict=True)) for has in product((True, False), repeat=2)]
    return [
        {**device, **has, **random_run(draw, kind)}
        for has, kind, device in product(compilers, RUNS, devices)
    ]


def random_run(draw: random.Random, kind: str) -> dict:
    """Draw the times of a run. "break-even": the steps save as much time as compiling takes."""
    if kind == "break-even":
        steps = 4 * draw.randint(10, 90)
        times = {"seconds_per_step": 0.5, "seconds_per_step_compiled": 0.25}
        return {"steps": steps, "compile_seconds": steps / 4, **times}
    step, compile_seconds = round(draw.uniform(0.05, 0.5), 3), float(draw.randint(20, 90))
    saved = round(step * draw.uniform(0.1, 0.4) * (-1 if kind == "slower" else 1), 3)
    pays_back_after = compile_seconds / abs(saved)
    factor = draw.uniform(0.01, 0.6) if kind == "short" else draw.uniform(1.7, 40)
    return {
        "steps": int(pays_back_after * factor) + 1,
        "compile_seconds": compile_seconds,
        "seconds_per_step": step,
        "seconds_per_step_compiled": round(step - saved, 3),
    }


def right_setting(machine: dict) -> dict:
    if machine["device"] == "cpu":
        precision = "bf16" if machine["bf16_instructions"] else "no"
        can_compile = machine["has_cxx_compiler"]
    else:
        major = machine["compute_capability"][0]
        precision = "bf16" if major >= 8 else "fp16" if major == 7 else "no"
        can_compile = machine["has_c_compiler"] and major >= 7
    pays_back = saved_seconds(machine) > machine["compile_seconds"]
    return dict(zip(KEYS, (precision, precision == "fp16", can_compile and pays_back), strict=True))


def saved_seconds(machine: dict) -> float:
    """Return the time that compilation saves in the run's steps. It may be negative."""
    per_step = machine["seconds_per_step"] - machine["seconds_per_step_compiled"]
    return machine["steps"] * per_step


def describe_machine(machine: dict) -> str:
    """Describe the machine and the run for a message."""
    if machine["device"] == "cpu":
        device = f"a CPU {'with' if machine['bf16_instructions'] else 'without'} bf16 instructions"
    else:
        device = "a GPU with compute capability {}.{}".format(*machine["compute_capability"])
    missing = [name for key, name in COMPILERS.items() if not machine[key]]
    without = f", without a {' and a '.join(missing)} compiler" if missing else ""
    return f"{device}{without}, for {machine['steps']:,} steps"


def observe(answer: Path) -> None:
    setting = import_answer(answer).setting
    for machine in machines():
        with prefixed(f"{describe_machine(machine)}: "):
            with naming_errors("setting raises"):
                returned = setting(dict(machine))
            judge_setting(machine, returned)


def judge_setting(machine: dict, setting) -> None:
    if not isinstance(setting, dict) or set(setting) != set(KEYS):
        raise Wrong(f"setting returns {setting!r} instead of a dictionary with {', '.join(KEYS)}")
    precision, has_scaler, is_compiled = (setting[key] for key in KEYS)
    if precision not in PRECISIONS:
        raise Wrong(f"mixed_precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    for key in KEYS[1:]:
        if not isinstance(setting[key], bool):
            raise Wrong(f"{key} must be True or False, not {setting[key]!r}")
    right_precision, needs_scaler, should_compile = right_setting(machine).values()
    if precision != right_precision:
        raise wrong_precision(machine, right_precision, precision)
    if needs_scaler and not has_scaler:
        raise Wrong("fp16 needs a scaler: without one, gradients below 3e-8 become zero", SCALING)
    if has_scaler and not needs_scaler:
        raise Wrong(f'"{precision}" needs no scaler, because its range is that of fp32', SCALING)
    if is_compiled != should_compile:
        raise wrong_compile(machine, is_compiled)


def wrong_precision(machine: dict, right: str, precision: str) -> Wrong:
    if machine["device"] == "cpu":
        if precision == "fp16":
            return Wrong(
                "fp16 is for GPUs. On a CPU, Accelerate silently trains without it: with this "
                f"setting a layer returns {dtype_on_cpu(precision)}",
                MISTAKES,
            )
        if precision == "bf16":
            return Wrong("bf16 is emulated on this CPU, and slower than fp32", FASTER_BF16)
        return Wrong("this CPU computes faster in bf16 than in fp32", FASTER_BF16)
    if precision == "bf16":
        return Wrong(
            "this GPU is too old for bf16, and only emulates it. is_bf16_supported() includes "
            "emulation, unless you pass including_emulation=False",
            ON_GPUS,
        )
    if right == "no":
        return Wrong("fp16 is not faster on a GPU without tensor cores", ON_GPUS)
    if precision == "no":
        return Wrong("this GPU has tensor cores, which are faster in 16 bits than in fp32", ON_GPUS)
    return Wrong("fp16 works, but bf16 is as fast here and needs no scaler", ON_GPUS)


def wrong_compile(machine: dict, is_compiled: bool) -> Wrong:
    is_cpu, saved = machine["device"] == "cpu", saved_seconds(machine)
    needed, other = list(COMPILERS)[::-1] if is_cpu else COMPILERS
    if not is_compiled:
        why = f"not compiled, but compiling takes {machine['compile_seconds']:g} s and the compiled"
        unused = "" if machine[other] else f". A {COMPILERS[other]} compiler is not needed here"
        heading = PAYS_OFF if machine[other] else ON_GPUS
        return Wrong(f"{why} steps save {saved:,.0f} s{unused}", heading)
    if saved <= 0:
        return Wrong("compiled, although the compiled steps are slower here", PAYS_OFF)
    if saved <= machine["compile_seconds"]:
        costs = f"compiling takes {machine['compile_seconds']:g} s"
        return Wrong(f"compiled, but {costs} and the steps save only {saved:,.1f} s", PAYS_OFF)
    if is_cpu:
        return Wrong("compiled, but this fails with the error InvalidCxxCompiler", MISTAKES)
    if not machine[needed]:
        return Wrong('compiled, but this fails with "Failed to find C compiler"', ON_GPUS)
    return Wrong("compiled, but this fails with the error GPUTooOldForTriton", ON_GPUS)


def dtype_on_cpu(precision: str) -> str:
    """Return the dtype of a layer's output if Accelerate prepares the layer on a CPU."""
    from accelerate import Accelerator

    returned = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda layer, inputs, output: returned.append(output.dtype))
    Accelerator(cpu=True, mixed_precision=precision).prepare(layer)(torch.ones(1, 2))
    return str(returned[0]).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=f"all {len(machines())} settings are correct"))

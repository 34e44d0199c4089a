"""Grade exercise 33: check the settings for many machines."""

import sys
from pathlib import Path

from grading import Wrong, grade, import_answer, naming_errors, prefixed, torch

KEYS = ("mixed_precision", "grad_scaler")
PRECISIONS = ("no", "fp16", "bf16")
CAPABILITIES = [(9, 0), (7, 5), (6, 1), (7, 0), (8, 0), (5, 2), (8, 6), (8, 9), (10, 0), (12, 0)]
# Headings of page 33
ON_GPUS, MISTAKES = "On GPUs", "Common mistakes"
SCALING, FASTER_BF16 = "Why fp16 needs loss scaling", "When bf16 is faster"


def machines() -> list[dict]:
    """Return two CPUs and ten GPUs."""
    cpu = {"device": "cpu", "compute_capability": None, "is_bf16_supported": False}
    # Every GPU can at least emulate bf16, so torch.cuda.is_bf16_supported() is True for all.
    gpu = {"device": "cuda", "bf16_instructions": False, "is_bf16_supported": True}
    cpus = [{**cpu, "bf16_instructions": has_bf16} for has_bf16 in (False, True)]
    return [*cpus, *({**gpu, "compute_capability": capability} for capability in CAPABILITIES)]


def right_setting(machine: dict) -> dict:
    if machine["device"] == "cpu":
        precision = "bf16" if machine["bf16_instructions"] else "no"
    else:
        major = machine["compute_capability"][0]
        precision = "bf16" if major >= 8 else "fp16" if major == 7 else "no"
    return dict(zip(KEYS, (precision, precision == "fp16"), strict=True))


def describe_machine(machine: dict) -> str:
    if machine["device"] == "cpu":
        return f"a CPU {'with' if machine['bf16_instructions'] else 'without'} bf16 instructions"
    return "a GPU with compute capability {}.{}".format(*machine["compute_capability"])


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
    precision, has_scaler = (setting[key] for key in KEYS)
    if precision not in PRECISIONS:
        raise Wrong(f"mixed_precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    if not isinstance(has_scaler, bool):
        raise Wrong(f"grad_scaler must be True or False, not {has_scaler!r}")
    right_precision, needs_scaler = right_setting(machine).values()
    if precision != right_precision:
        raise wrong_precision(machine, right_precision, precision)
    if needs_scaler and not has_scaler:
        raise Wrong("fp16 needs a scaler: without one, gradients below 3e-8 become zero", SCALING)
    if has_scaler and not needs_scaler:
        raise Wrong(f'"{precision}" needs no scaler, because its range is that of fp32', SCALING)


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

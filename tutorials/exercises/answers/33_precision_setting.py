"""A model answer to exercise 33."""


def setting(machine: dict) -> dict:
    is_cpu = machine["device"] == "cpu"
    if is_cpu:
        precision = "bf16" if machine["bf16_instructions"] else "no"
    elif machine["compute_capability"] >= (8, 0):  # is_bf16_supported includes emulation
        precision = "bf16"
    elif machine["compute_capability"] >= (7, 0):
        precision = "fp16"
    else:
        precision = "no"
    saved = machine["seconds_per_step"] - machine["seconds_per_step_compiled"]
    pays_back = machine["steps"] * saved > machine["compile_seconds"]
    return {
        "mixed_precision": precision,
        "grad_scaler": precision == "fp16",
        "compile": pays_back and (machine["has_compiler"] or not is_cpu),
    }

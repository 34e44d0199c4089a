"""Exercise 33: choose the precision for a training run, and whether to compile the model."""

# The first compute capability with tensor cores for a format, the format without a scaler first.
TENSOR_CORES = {"bf16": (8, 0), "fp16": (7, 0)}
TRITON_NEEDS = (7, 0)


def setting(machine: dict) -> dict:
    if machine["device"] == "cuda":
        fast = [name for name, needs in TENSOR_CORES.items() if _capability(machine) >= needs]
        can_compile = machine["has_c_compiler"] and _capability(machine) >= TRITON_NEEDS
    else:
        fast = ["bf16"] if machine["bf16_instructions"] else []
        can_compile = machine["has_cxx_compiler"]
    precision = next(iter(fast), "no")
    saved = machine["seconds_per_step"] - machine["seconds_per_step_compiled"]
    return {
        "mixed_precision": precision,
        "grad_scaler": precision == "fp16",
        "compile": can_compile and machine["steps"] * saved > machine["compile_seconds"],
    }


def _capability(machine: dict) -> tuple[int, int]:
    major, minor = machine["compute_capability"]
    return major, minor

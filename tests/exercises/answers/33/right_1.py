"""Exercise 33: precision and compilation for one machine."""

TENSOR_CORES = {"bf16": (8, 0), "fp16": (7, 0)}  # oldest GPU; bf16 is first as it needs no scaler
TRITON = (7, 0)


def on_gpu(capability, has_c_compiler):
    usable = [name for name, oldest in TENSOR_CORES.items() if capability >= oldest]
    return (usable or ["no"])[0], has_c_compiler and capability >= TRITON


def setting(machine: dict) -> dict:
    if machine["device"] == "cuda":
        precision, compiles = on_gpu(machine["compute_capability"], machine["has_c_compiler"])
    else:
        precision = "bf16" if machine["bf16_instructions"] else "no"
        compiles = machine["has_cxx_compiler"]
    saved = machine["seconds_per_step"] - machine["seconds_per_step_compiled"]
    return {
        "mixed_precision": precision,
        "grad_scaler": precision == "fp16",
        "compile": compiles and saved * machine["steps"] > machine["compile_seconds"],
    }

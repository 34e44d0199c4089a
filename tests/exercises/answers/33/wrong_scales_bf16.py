# wrong: "bf16" needs no scaler


def setting(machine: dict) -> dict:
    if machine["device"] == "cpu":
        precision = "bf16" if machine["bf16_instructions"] else "no"
        can_compile = machine["has_cxx_compiler"]
    else:
        capability = machine["compute_capability"]
        has_bf16, has_fp16 = capability >= (8, 0), capability >= (7, 0)
        precision = "bf16" if has_bf16 else "fp16" if has_fp16 else "no"
        can_compile = machine["has_c_compiler"] and capability >= (7, 0)  # for Triton
    saved = machine["seconds_per_step"] - machine["seconds_per_step_compiled"]
    pays_back = machine["steps"] * saved > machine["compile_seconds"]
    return {
        "mixed_precision": precision,
        "grad_scaler": precision != "no",
        "compile": can_compile and pays_back,
    }

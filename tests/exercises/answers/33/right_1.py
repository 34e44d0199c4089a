"""Exercise 33: precision for one machine."""

TENSOR_CORES = {"bf16": (8, 0), "fp16": (7, 0)}  # oldest GPU; bf16 is first as it needs no scaler


def on_gpu(capability):
    usable = [name for name, oldest in TENSOR_CORES.items() if capability >= oldest]
    return (usable or ["no"])[0]


def setting(machine: dict) -> dict:
    if machine["device"] == "cuda":
        precision = on_gpu(machine["compute_capability"])
    else:
        precision = "bf16" if machine["bf16_instructions"] else "no"
    return {"mixed_precision": precision, "grad_scaler": precision == "fp16"}

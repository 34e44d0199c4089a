"""A model answer to exercise 33."""


def setting(machine: dict) -> dict:
    if machine["device"] == "cpu":
        precision = "bf16" if machine["bf16_instructions"] else "no"
    else:
        capability = machine["compute_capability"]
        has_bf16, has_fp16 = capability >= (8, 0), capability >= (7, 0)
        precision = "bf16" if has_bf16 else "fp16" if has_fp16 else "no"
    return {"mixed_precision": precision, "grad_scaler": precision == "fp16"}

"""Exercise 33: choose the precision for a training run."""


def setting(machine: dict) -> dict:
    major, _ = machine["compute_capability"] or (0, 0)
    if machine["bf16_instructions"] or major >= 8:
        return {"mixed_precision": "bf16", "grad_scaler": False}
    is_volta_or_turing = major == 7
    precision = "fp16" if is_volta_or_turing else "no"
    return {"mixed_precision": precision, "grad_scaler": is_volta_or_turing}

# wrong: a CPU without bf16 instructions, for 5,696 steps: setting raises TypeError: '>=' not


def setting(machine):
    capability = machine["compute_capability"]
    has_bf16, has_fp16 = capability >= (8, 0), capability >= (7, 0)
    precision = "bf16" if has_bf16 else "fp16" if has_fp16 else "no"
    return {"mixed_precision": precision, "grad_scaler": precision == "fp16", "compile": has_fp16}

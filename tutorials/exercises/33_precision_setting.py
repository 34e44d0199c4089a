"""Exercise 33: choose the precision for a training run.

`setting` takes a dictionary that describes a machine:

    device                    "cpu" or "cuda"
    bf16_instructions         True if the device is a CPU with instructions to multiply bfloat16
                              (assume that bf16 is then faster)
    compute_capability        for a GPU: the result of torch.cuda.get_device_capability(), such
                              as (7, 5) for a T4 or (9, 0) for an H100; None for a CPU (there is
                              no GPU of the GTX 16 series, which has no tensor cores)
    is_bf16_supported         the result of torch.cuda.is_bf16_supported() on this machine

It returns a dictionary with the fastest setting that trains well:

    mixed_precision           "no", "fp16" or "bf16"; if a GPU has tensor cores for both fp16 and
                              bf16, choose the one that needs no scaler
    grad_scaler               True if the loss must be scaled

The check calls `setting` for a dozen machines, old and new.

accel-demo check 33
"""


def setting(machine: dict) -> dict:
    return {"mixed_precision": "fp16", "grad_scaler": False}

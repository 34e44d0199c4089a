"""Exercise 33: choose the precision for a training run, and whether to compile the model.

`setting` takes a dictionary that describes a machine and a training run on it:

    device                    "cpu" or "cuda"
    bf16_instructions         True if the device is a CPU with instructions to multiply bfloat16
    compute_capability        for a GPU: the result of torch.cuda.get_device_capability(), such
                              as (7, 5) for a T4, or (9, 0) for an H100; None for a CPU
    is_bf16_supported         the result of torch.cuda.is_bf16_supported() on this machine
    has_compiler              True if there is a C++ compiler. GPU kernels do not need it (Triton
                              uses a C compiler for them)
    steps                     number of steps in the run
    compile_seconds           time that torch.compile takes once, at the start
    seconds_per_step          time of a step without compilation
    seconds_per_step_compiled time of a step with compilation

It returns a dictionary with the fastest setting that trains well:

    mixed_precision           "no", "fp16" or "bf16"
    grad_scaler               True if the loss must be scaled
    compile                   True if the run ends sooner with torch.compile

Three hints. GPUs have tensor cores for fp16 from compute capability 7.0 on, and for bf16 from 8.0
on. If a GPU has both, use the precision that needs no scaler. One of the values above is a trap.

accel-demo check 33
"""


def setting(machine: dict) -> dict:
    return {"mixed_precision": "fp16", "grad_scaler": False, "compile": True}

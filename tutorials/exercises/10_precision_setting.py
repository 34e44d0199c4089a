"""Exercise 10: choose precision and compilation for a machine and a run.

`setting` gets a machine and returns three choices. A machine is a dictionary:

    device                    "cpu" or "cuda"
    bf16_instructions         for a CPU: whether it has instructions to multiply bfloat16
    compute_capability        for a GPU: the result of torch.cuda.get_device_capability(), like
                              (7, 5) for a T4 of 2018, or (9, 0) for an H100; None for a CPU
    is_bf16_supported         the result of torch.cuda.is_bf16_supported() on this machine
    has_compiler              whether there is a C++ compiler. Kernels for a GPU do not need one
                              (Triton needs a C compiler for them)
    steps                     how many steps the run will take
    compile_seconds           how long torch.compile takes at the start
    seconds_per_step          of the network without compilation
    seconds_per_step_compiled of the compiled network

It returns the fastest setting that trains well:

    mixed_precision           "no", "fp16" or "bf16"
    grad_scaler               whether the loss must be scaled
    compile                   whether the run ends sooner with torch.compile

Three hints. Tensor cores for fp16 exist since compute capability 7.0, and for bf16 since 8.0. If a
device has both, use the precision that needs no scaler. One of the values above is a trap.

accel-demo check 10
"""


def setting(machine: dict) -> dict:
    return {"mixed_precision": "fp16", "grad_scaler": False, "compile": True}

"""Exercise 33: choose the precision for a training run and whether to compile the model.

`setting` takes a dictionary that describes a machine and a training run on it:

    device                    "cpu" or "cuda"
    bf16_instructions         True if the device is a CPU with instructions to multiply bfloat16
                              (assume that bf16 is then faster)
    compute_capability        for a GPU: the result of torch.cuda.get_device_capability(), such
                              as (7, 5) for a T4 or (9, 0) for an H100; None for a CPU (there is
                              no GPU of the GTX 16 series, which has no tensor cores)
    is_bf16_supported         the result of torch.cuda.is_bf16_supported() on this machine
    has_c_compiler            True if there is a C compiler, such as gcc or clang
    has_cxx_compiler          True if there is a C++ compiler, such as g++ or clang++
    steps                     number of steps in the run
    compile_seconds           time that torch.compile takes, once, at the start
    seconds_per_step          time per step without compilation
    seconds_per_step_compiled time per step with compilation

It returns a dictionary with the fastest setting that trains well:

    mixed_precision           "no", "fp16" or "bf16"; if a GPU has tensor cores for both fp16 and
                              bf16, choose the one that needs no scaler
    grad_scaler               True if the loss must be scaled
    compile                   True if torch.compile works on this machine and makes the run end
                              sooner (the times don't depend on the precision)

The check calls `setting` for more than a hundred machines, old and new. All values have
built-in Python types, such as bool.

accel-demo check 33
"""


def setting(machine: dict) -> dict:
    return {"mixed_precision": "fp16", "grad_scaler": False, "compile": True}

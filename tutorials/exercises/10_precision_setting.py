"""Exercise 10: choose precision and compilation for a machine and a run.

`setting` gets a machine and gives three choices. A machine is a dictionary:

    device                    "cpu" or "cuda"
    bf16_instructions         of a CPU: whether it multiplies bfloat16 itself
    compute_capability        of a GPU, as torch.cuda.get_device_capability() gives it: (7, 5) is
                              a card of 2018 (T4), (9, 0) one of today (H100); None for a CPU
    is_bf16_supported         what torch.cuda.is_bf16_supported() says there
    has_compiler              whether there is a C++ compiler; a GPU's kernels do without (there
                              Triton asks for one for C)
    steps                     how many steps the run will take
    compile_seconds           how long torch.compile takes at the start
    seconds_per_step          of the network as it is
    seconds_per_step_compiled of the compiled one

It gives the fastest setting that trains well:

    mixed_precision           "no", "fp16" or "bf16"
    grad_scaler               whether the loss has to be scaled
    compile                   whether the run is over sooner with torch.compile

Three hints. Tensor cores for fp16 came with compute capability 7.0, those for bf16 with 8.0. Where
a device has both, take the one that needs no scaler. One of the values above is a trap.

accel-demo check 10
"""


def setting(machine: dict) -> dict:
    return {"mixed_precision": "fp16", "grad_scaler": False, "compile": True}

"""The formulas for the memory of a training step on each device.

In the formulas, P is the number of parameters and N is the number of devices. The results are in
bytes, and each float32 takes four.
"""

KINDS = ["parameters", "gradients", "optimizer state", "buckets", "copies", "activations"]
STRATEGIES = ["nn.DataParallel", "DDP", "FSDP2"]
# Number of state tensors per parameter: AdamW has two moving averages, SGD has the momentum.
# https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
STATES = {"adamw": 2, "sgd": 1}
FLOAT = 4  # bytes
Bytes = dict[str, int]  # {kind of memory: bytes}

# On the CPU, the formulas for nn.DataParallel are for all devices together.
FORMULAS = {
    "nn.DataParallel": {
        "parameters": "4P",
        "gradients": "4P",
        "copies": "4P per additional device",
        "activations": "all layers, for all images",
    },
    "DDP": {
        "parameters": "4P",
        "gradients": "4P",
        "buckets": "4P",
        "activations": "all layers, for a rank's images",
    },
    "FSDP2": {
        "parameters": "4P / N",
        "gradients": "4P / N",
        "copies": "parameters of the largest layer",
        "activations": "all layers, for a rank's images",
    },
}
STATE_FORMULAS = {"adamw": "8P", "sgd": "4P"}


def formula_of(strategy: str, kind: str, optimizer: str) -> str:
    """Return the formula for this kind of memory, or "" if the strategy does not use this kind."""
    if kind == "optimizer state":
        return STATE_FORMULAS[optimizer] + (" / N" if strategy == "FSDP2" else "")
    return FORMULAS[strategy].get(kind, "")

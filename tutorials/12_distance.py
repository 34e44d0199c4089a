"""Print the largest difference between saved weights.

python tutorials/12_distance.py runs/page_12/plain/last.pt runs/page_12/accelerate/last
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def weights_in(path):
    """Read a file of weights, a checkpoint with one of these entries, or a folder of save_state."""
    if Path(path).is_dir():
        state = load_file(Path(path) / "model.safetensors")
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    for entry in ("model", "model_state_dict", "state_dict"):
        state = state.get(entry, state)
    return {name.removeprefix("module."): values.double() for name, values in state.items()}


if __name__ == "__main__":
    one, other = map(weights_in, sys.argv[1:])
    if in_one := one.keys() ^ other.keys():  # save_state writes tied weights once
        print("only in one of them:", *sorted(in_one))
    if not (names := one.keys() & other.keys()):
        sys.exit("no weight has the same name in both")
    differences = [(one[name] - other[name]).abs().max() for name in names]
    print(torch.stack(differences).max().item())  # nan if one of them is

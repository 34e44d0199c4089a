"""Compare the weights that 11_plain.py, 11_ddp.py and 11_accelerate.py train.

python tutorials/11_compare.py
"""

import os
import runpy
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DataLoaderConfiguration

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.processes.launch import spawn
from accel_demo.wording import counted

SEEDABLE = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
PAIRS = [  # processes, and the two programs to compare with their options
    (1, ("plain", {}), ("accelerate", {})),
    (1, ("plain", {}), ("ddp", {})),
    (2, ("ddp", {}), ("accelerate", {})),
    (2, ("ddp", {}), ("accelerate", {"dataloader_config": SEEDABLE})),
]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # so that every program adds in the same order
    rows = []
    for row, (processes, *programs) in enumerate(PAIRS, start=1):
        first, second = (weights_of(name, options, processes) for name, options in programs)
        names = [
            f"`11_{name}.py`" + (", seedable" if options else "") for name, options in programs
        ]
        difference = (first - second).abs().max().item()
        rows.append([row, processes, *names, in_words(difference)])
    programs = ["first program", "second program"]
    print(show.table(["row", "processes", *programs, "largest weight difference"], rows))


def in_words(difference: float) -> str:
    """Describe a difference without digits that change with the processor."""
    if difference == 0:
        return "0: equal bits"
    if difference < 1e-6:
        return "below 1e-6: rounding"
    if difference < 0.01:
        return f"{difference:.0e}"
    if difference >= 0.01:
        return "above 0.01"
    raise ValueError(f"the weights differ by {difference}")  # NaN


def weights_of(name: str, options: dict, processes: int) -> torch.Tensor:
    """Train in this many processes, and return rank 0's weights, all in one vector."""
    print(f"11_{name}.py, {counted(processes, 'process')}{', seedable' if options else ''}:")
    weights = spawn(train, processes, name, options)
    if len(weights) != processes or any(not torch.equal(each, weights[0]) for each in weights):
        raise RuntimeError(f"{name}: the processes ended with different weights")
    return weights[0]


def train(name: str, options: dict) -> torch.Tensor:
    """Train on this rank with one of the programs, and return all weights in one vector."""
    model = runpy.run_path(str(Path(__file__).with_name(f"11_{name}.py")))["main"](**options)
    # Unconnected processes would end with equal weights, too. (`init_process_group` would fail.)
    if name == "accelerate" and PartialState().num_processes != int(os.environ["WORLD_SIZE"]):
        raise RuntimeError("Accelerate has not connected the processes")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    with one_line_errors():
        main()

"""The `together` fixture runs this program in each process, to call a test module's function."""

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.processes.group import run_in_group


def call(device: torch.device, target: str, folder: Path) -> None:
    """Call the function and save its result. Pass `device` if the function has this parameter."""
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    if "device" in function.__code__.co_varnames[: function.__code__.co_argcount]:
        arguments["device"] = device
    torch.save(function(**arguments), folder / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    run_in_group(call, int(sys.argv[2]), sys.argv[1], Path(sys.argv[3]))

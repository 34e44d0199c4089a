"""Start two processes from Python, as in a notebook, and print what Accelerate reports in each.

python tutorials/94_notebook.py
"""

import io
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator, debug_launcher, notebook_launcher

from accel_demo.processes.launch import free_port
from accel_demo.show import table

BF16 = {"mixed_precision": "bf16"}


def train(folder: str, options: dict) -> None:
    """Create an `Accelerator`, and write what it reports to a file in `folder`."""
    accelerator = Accelerator(**options)
    process = f"process {accelerator.process_index} of {accelerator.num_processes}"
    precision = accelerator.mixed_precision.replace("no", "fp32")
    Path(folder, str(os.getpid())).write_text(f"`{process}, {precision}`")
    if dist.is_initialized():  # even where Accelerate sees one process: without this wait, a
        dist.barrier()  # process could end while the other one is still connecting to it
    accelerator.end_training()


def launch(launcher, options: dict, **launcher_options) -> str:
    """Call the launcher. Return what the processes reported, or the launcher's error."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        try:
            launcher(train, (folder, options), num_processes=2, **launcher_options)
        except ValueError as error:
            return f"`` ValueError: {error} ``"
        return ", ".join(sorted(file.read_text() for file in Path(folder).iterdir()))


def notebook(options: dict, **launcher_options) -> str:
    return launch(notebook_launcher, options, use_port=str(free_port()), **launcher_options)


def main() -> None:
    call, on_cpu = "`notebook_launcher(train, …, num_processes=2{})`", "`Accelerator(cpu=True{})`"
    bf16, debug = ', mixed_precision="bf16"', "`debug_launcher(train, …, num_processes=2)`"
    rows = [
        [call.format(""), "`Accelerator()`", notebook({})],
        [call.format(""), on_cpu.format(""), notebook({"cpu": True})],
        [call.format(bf16), on_cpu.format(""), notebook({"cpu": True}, **BF16)],
        [call.format(""), on_cpu.format(bf16), notebook({"cpu": True, **BF16})],
    ]
    can_debug = sys.platform != "darwin"  # debug_launcher needs the network interface `lo`
    if can_debug:
        rows.append([debug, "`Accelerator()`", launch(debug_launcher, {})])
    Accelerator(cpu=True)  # from now on, this process has an Accelerator
    rows.append([f"`Accelerator()`, then {call.format('')}", "", notebook({})])
    if can_debug:
        launched = launch(debug_launcher, {})
        rows.append([f"`Accelerator()`, then {debug}", "`Accelerator()`", launched])
    print(table(["in the notebook", "in `train`", "result"], rows))


if __name__ == "__main__":
    main()

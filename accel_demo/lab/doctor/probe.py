"""What a launch really gives: every process it starts prints one line. The doctor launches this.

accelerate launch --config_file accelerate_configs/cpu.yaml -m accel_demo.lab.doctor.probe
"""

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_demo.processes.connect import use_cpu


def main() -> None:
    accelerator = Accelerator(cpu=use_cpu())  # as in train.py
    device, rank = accelerator.device, accelerator.process_index
    pid = os.getpid()
    total: Any = accelerator.reduce(torch.tensor(rank + 1.0, device=device), reduction="sum")
    pids: Any = accelerator.gather(torch.tensor([pid], device=device))
    connected = torch.distributed.is_initialized()
    facts = {
        "rank": rank,
        "world_size": accelerator.num_processes,
        "backend": torch.distributed.get_backend() if connected else "none",
        "device": str(device),
        "dtype": layer_dtype(accelerator),
        "pid": pid,
        "pids": pids.tolist(),
        "sum": total.item(),
    }
    # One write, with its newline: print makes two of them, and another process gets in between.
    sys.stdout.write(f"PROBE {json.dumps(facts)}\n")
    sys.stdout.flush()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def layer_dtype(accelerator: Accelerator) -> str:
    """What a layer of a prepared model computes in, such as "bfloat16"."""
    # A layer inside a model: what the model itself returns, Accelerate turns back into float32.
    layer, seen = nn.Linear(8, 8), []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model = accelerator.prepare(nn.Sequential(layer))
    model(torch.ones(4, 8, device=accelerator.device))
    return str(seen[0]).removeprefix("torch.")


if __name__ == "__main__":
    main()

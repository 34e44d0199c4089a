"""Print one line that describes this process. `accel-demo doctor` launches this on every rank.

accelerate launch --config_file accelerate_configs/cpu.yaml -m accel_demo.lab.doctor.probe
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_demo.lab.doctor.launch_config import ProbeAnswer
from accel_demo.processes.connect import use_cpu


def main() -> None:
    accelerator = Accelerator(cpu=use_cpu())  # as in train.py
    device, rank = accelerator.device, accelerator.process_index
    pid = os.getpid()
    total: Any = accelerator.reduce(torch.tensor(rank + 1.0, device=device), reduction="sum")
    pids: Any = accelerator.gather(torch.tensor([pid], device=device))
    connected = torch.distributed.is_initialized()
    answer = ProbeAnswer(
        rank=rank,
        world_size=accelerator.num_processes,
        backend=torch.distributed.get_backend() if connected else "none",
        device=str(device),
        dtype=layer_dtype(accelerator),
        pid=pid,
        gathered_pids=pids.tolist(),
        sum_of_ranks=total.item(),
    )
    # `print` would write the newline separately, so another process could write before it.
    sys.stdout.write(f"PROBE {json.dumps(asdict(answer))}\n")
    sys.stdout.flush()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def layer_dtype(accelerator: Accelerator) -> str:
    """Return the dtype in which a layer of a prepared model computes, such as "bfloat16"."""
    # Hook an inner layer, because Accelerate converts the model's output back to float32.
    layer, dtypes = nn.Linear(8, 8), []
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    model = accelerator.prepare(nn.Sequential(layer))
    model(torch.ones(4, 8, device=accelerator.device))
    return str(dtypes[0]).removeprefix("torch.")


if __name__ == "__main__":
    main()

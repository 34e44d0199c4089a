"""Print one line that describes this process. `accel-demo doctor` launches this on every rank.

accelerate launch --config_file accelerate_configs/cpu.yaml -m accel_demo.lab.doctor.probe
accelerate launch --config_file accelerate_configs/cpu.yaml -m accel_demo.lab.doctor.probe --plain

It creates Accelerator(cpu=use_cpu()), as train.py does. With --plain, it creates Accelerator().
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env
from torch import nn

from accel_demo.lab.doctor.launch_config import ProbeAnswer
from accel_demo.processes.devices import use_cpu

KINDS = {
    "DistributedDataParallel": "DDP",
    "FSDPModule": "FSDP2",
    "FullyShardedDataParallel": "FSDP1",
    "DeepSpeedEngine": "DeepSpeed",
}


def main() -> None:
    cpu = "--plain" not in sys.argv and use_cpu()
    accelerator = Accelerator(cpu=cpu)
    device, rank = accelerator.device, accelerator.process_index
    pid = os.getpid()
    total: Any = accelerator.reduce(torch.tensor(rank + 1.0, device=device), reduction="sum")
    pids: Any = accelerator.gather(torch.tensor([pid], device=device))
    connected = torch.distributed.is_initialized()
    model = nn.Sequential(nn.Linear(8, 8))
    parameters, dtypes = number_of_parameters(model), []
    # Hook an inner layer, because Accelerate converts the model's output back to float32.
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    if plugin := accelerator.deepspeed_plugin:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1  # instead of a data loader
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        # These also need the optimizer.
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    else:
        model = accelerator.prepare(model)
    dtype = next(model.parameters()).dtype  # DeepSpeed converts the model, but not the input
    model(torch.ones(4, 8, device=device, dtype=dtype))
    is_alone = accelerator.num_processes == 1  # there is nothing to connect
    answer = ProbeAnswer(
        rank=rank,
        world_size=accelerator.num_processes,
        backend=torch.distributed.get_backend() if connected else "none",
        device=str(device),
        dtype=str(dtypes[0]).removeprefix("torch."),
        kind=kind_of(model),
        is_sharded=number_of_parameters(model) < parameters,
        pid=pid,
        gathered_pids=pids.tolist(),
        sum_of_ranks=total.item(),
        is_plain=not cpu or is_alone or parse_flag_from_env("ACCELERATE_USE_CPU"),
    )
    # `print` would write the newline separately, so another process could write before it.
    sys.stdout.write(f"PROBE {json.dumps(asdict(answer))}\n")
    sys.stdout.flush()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def number_of_parameters(model: nn.Module) -> int:
    """Return the number of parameters that this process holds."""
    parameters: list[Any] = list(model.parameters())  # with `to_local` if they are sharded
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters)


def kind_of(model: nn.Module) -> str:
    """Return how the prepared model is distributed: "DDP", "FSDP2", … or "none"."""
    classes = [kind.__name__ for kind in type(model).__mro__]  # so that FSDP need not be imported
    known = [KINDS[name] for name in classes if name in KINDS]
    return known[0] if known else "none"


if __name__ == "__main__":
    main()

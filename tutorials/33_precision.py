"""List the dtype of every tensor in a step of bf16 training.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    --mixed_precision bf16 tutorials/33_precision.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.nn.functional import cross_entropy

from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from accel_demo.processes.devices import use_cpu
from accel_demo.show import table


def main() -> None:
    accelerator, layers, kept, plain = train(DDPCommunicationHookType.NO)
    *_, halved = train(DDPCommunicationHookType.BF16)
    accelerator.print(f"Connected processes: {accelerator.num_processes}\n")
    accelerator.print(table(["layer or function", "input", "output"], layers))
    accelerator.print("\n" + table(["present after the step", "tensors", "dtypes"], kept))
    rows = [["none", *plain], ["`BF16`", *halved]]
    head = ["comm hook", "gradients of", "bytes all-reduced", "bytes each"]
    accelerator.print("\n" + table(head, rows))
    low = sum(output == "bfloat16" for *_, output in layers)
    stays = sum(count for _, count, dtypes in kept if "bfloat16" in dtypes)
    total = sum(count for _, count, _ in kept)
    accelerator.print(f"\nResults in bfloat16: {low} of {len(layers)}")
    accelerator.print(f"Tensors in bfloat16 afterwards: {stays} of {total}")
    accelerator.end_training()


def train(hook: DDPCommunicationHookType):
    """Run one training step. Return the Accelerator, and rows for the three tables.

    The tables list the dtypes of the layers, the tensors after the step, and the bytes sent.
    """
    handler = DistributedDataParallelKwargs(comm_hook=hook)
    accelerator = Accelerator(cpu=use_cpu(), kwargs_handlers=[handler])
    network, layers = make_model(TrainConfig()), []

    def note(layer, inputs, output):
        layers.append([f"`{type(layer).__name__}`", dtype(inputs[0]), dtype(output)])

    for layer in network:
        layer.register_forward_hook(note)
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    images = torch.rand(8, 1, 28, 28, device=accelerator.device)
    logits = model(images)
    layers.append(["the prepared model", dtype(images), dtype(logits)])
    loss = cross_entropy(logits, torch.arange(8, device=accelerator.device))
    layers.append(["`cross_entropy`", dtype(logits), dtype(loss)])
    with recorded() as collectives:
        accelerator.backward(loss)
    optimizer.step()

    weights = list(model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values()]
    everything = {"weights": weights, "gradients": [w.grad for w in weights], "AdamW": state}
    kept = [
        [kind, len(tensors), ", ".join(sorted({*map(dtype, tensors)}))]
        for kind, tensors in everything.items()
    ]
    numbers = sum(weight.numel() for weight in weights)
    sent = sum(call.size for call in collectives if call.name.startswith("all"))
    return accelerator, layers, kept, [f"{numbers:,} weights", f"{sent:,}", sent // numbers]


def dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()

"""Print how many all-reduces have run after each call in a window of four micro-batches.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/23_accumulation.py
"""

import torch
from accelerate import Accelerator
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss

from accel_demo.processes.devices import use_cpu

WINDOW, BATCH = 4, 8


def main() -> None:
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    all_reduces = 0

    def count(group, bucket):  # DDP calls this instead of its default all-reduce
        nonlocal all_reduces
        all_reduces += 1
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, count)
    torch.manual_seed(1 + accelerator.process_index)  # different samples on each rank
    inputs = torch.randn(WINDOW * BATCH, 8, device=accelerator.device)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    full_batch = torch.autograd.grad(mse_loss(model.module(inputs), targets), [*model.parameters()])
    full_batch = accelerator.reduce(flat(full_batch), "mean")  # average over 32 samples per rank

    head = f"Connected processes: {accelerator.num_processes}\n\n"
    head += "| micro-batch | after forward | after backward | after step | gradients |"
    accelerator.print(f"{head}\n|---|---|---|---|---|")
    batches = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    for number, (some_inputs, some_targets) in enumerate(batches, start=1):
        with accelerator.accumulate(model):
            loss = mse_loss(model(some_inputs), some_targets)
            row = [number, all_reduces]
            accelerator.backward(loss)
            row.append(all_reduces)
            gradient = flat(weight.grad for weight in model.parameters())
            optimizer.step()
            row.append(all_reduces)
            optimizer.zero_grad()
        gathered = accelerator.gather(gradient[None])
        row.append("the same" if (gathered == gathered[0]).all() else "different on each rank")
        accelerator.print(f"| {' | '.join(map(str, row))} |")
    claim = f"\n{WINDOW} × {BATCH} and 1 × {WINDOW * BATCH} have the same gradient:"
    accelerator.print(claim, torch.allclose(gradient, full_batch, rtol=0, atol=1e-6))
    accelerator.end_training()


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


if __name__ == "__main__":
    main()

"""Print one epoch's learning rates for two schedule lengths and two ways to step the scheduler.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/31_batch_and_learning_rate.py
"""

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu

SAMPLES, BATCH = 64, 8  # BATCH is the batch size per process


def main() -> None:
    accelerator = Accelerator(cpu=use_cpu())
    accelerator.print(f"Connected processes: {accelerator.num_processes}\n")
    head = "| `len(loader)` read | stepped | 0 | 16 | 32 | 48 | 64 samples | ends at |"
    accelerator.print(f"{head}\n{'|---' * 8}|")
    for case in [("before", True), ("after", True), ("before", False), ("after", False)]:
        rates = train(*case)
        row = [f"{case[0]} `prepare`", "once per process (default)" if case[1] else "once"]
        row += [f"{rates[seen]:.4g}" for seen in range(0, SAMPLES + 1, 16)]
        row += [str(seen) for seen, rate in rates.items() if rate == 0][:1] or ["–"]
        accelerator.print(f"| {' | '.join(row)} |")
    accelerator.print("\n| `ReduceLROnPlateau` | epoch 1 | 2 | 3 | 4 |\n|---|---|---|---|---|")
    for label in ("prepared", "not prepared"):
        row, optimizer = [label], torch.optim.SGD([torch.zeros(1)], lr=1.0)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
        scheduler = accelerator.prepare(scheduler) if label == "prepared" else scheduler
        for _ in range(4):
            scheduler.step(1.0)  # as at the end of an epoch in which the loss has not improved
            row.append(f"{optimizer.param_groups[0]['lr']:.4g}")
        accelerator.print(f"| {' | '.join(row)} |")
    accelerator.end_training()


def train(sized: str, per_process: bool) -> dict[int, float]:
    """Train for one epoch, and return {total number of samples seen: learning rate}."""
    accelerator = Accelerator(cpu=use_cpu(), step_scheduler_with_optimizer=per_process)
    model, loader = torch.nn.Linear(1, 1), DataLoader(torch.zeros(SAMPLES, 1), BATCH)
    steps = {"before": len(loader)}
    model, loader = accelerator.prepare(model, loader)
    steps["after"] = len(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps[sized]))
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    rates = {0: 1.0}
    for step, samples in enumerate(loader, start=1):
        accelerator.backward(model(samples).mean())
        optimizer.step()
        scheduler.step()
        rates[step * len(samples) * accelerator.num_processes] = scheduler.get_last_lr()[0]
    return rates


if __name__ == "__main__":
    main()

"""Count the bytes that each method sends, and compare them with a formula.

torchrun --standalone --nproc-per-node 2 tutorials/46_send_less.py
"""

from itertools import islice

import torch
import torch.distributed as dist
from accelerate import Accelerator
from send_less import EVERY, METHODS, PLAIN_STEPS, make_model, own_batches, train
from torch import nn

from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.devices import use_cpu
from accel_demo.show import table

STEPS = 40


def main():
    Accelerator(cpu=use_cpu())  # connects the processes
    rows = []
    for method in METHODS:
        model = make_model()
        with recorded() as collectives:
            train(method, model, islice(own_batches(epochs=1), STEPS))
        counted = sum(each.size for each in collectives if each.name == "all_reduce")
        formula, later = bytes_sent(method, model, STEPS), bytes_later(method, model)
        agrees = "to the byte" if counted == formula else f"NO: {formula:,}"
        less = bytes_later("DDP", model) / later
        rows.append([method, f"{counted:,}", agrees, f"{later:,.0f}", f"{less:.1f}"])
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} connected processes\n")
        head = ["method", f"bytes in {STEPS} steps", "formula agrees"]
        print(table([*head, "bytes per later step", "times less"], rows))
    dist.destroy_process_group()


def bytes_sent(method: str, model: nn.Module, steps: int, every: int = EVERY) -> int:
    """Return the bytes that a rank passes to all-reduces. A ring sends 2(N - 1)/N times as many."""
    whole = sum(weight.nbytes for weight in model.parameters())
    if method == "bf16":
        return steps * whole // 2
    if method.startswith("PowerSGD"):
        compressed = sum(compressed_bytes(weight, int(method[-1])) for weight in model.parameters())
        return PLAIN_STEPS * whole + (steps - PLAIN_STEPS) * compressed
    if method == "LocalSGD":  # averages once more at its end
        return (steps // every + 1) * whole
    if method == "DiLoCo":
        return -(-steps // every) * whole
    return steps * whole


def bytes_later(method: str, model: nn.Module, every: int = EVERY) -> float:
    """Return the mean bytes per step after the plain steps of PowerSGD."""
    until = PLAIN_STEPS + every
    difference = bytes_sent(method, model, until, every)
    difference -= bytes_sent(method, model, PLAIN_STEPS, every)
    return difference / every


def compressed_bytes(weight: torch.Tensor, rank: int) -> int:
    """Return the bytes of P [rows, rank] and Q [columns, rank], or of a weight that stays whole."""
    rows, columns = len(weight), weight[0].numel()
    rank = min(rank, rows, columns)
    factors = weight.element_size() * (rows + columns) * rank
    return factors if 2 * factors < weight.nbytes else weight.nbytes


if __name__ == "__main__":
    main()

"""Count the calls, threads and processes in two training steps with DataParallel.

python tutorials/24_data_parallel.py
"""

import os
import threading

import torch
from torch import nn
from torch.nn.functional import mse_loss

from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.show import table

REPLICAS, STEPS = 4, 2
CALLS = []  # (function name, thread name, process id)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs):
        note("forward")
        return self.layer(inputs)

    def kernel_distance(self):  # not called by forward
        note("kernel_distance")
        return torch.cdist(self.layer.weight, self.layer.weight, p=1).sum()


def note(code: str) -> None:
    thread = threading.current_thread().name.replace("MainThread", "main")
    CALLS.append((code, thread, os.getpid()))


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # hide the GPUs, so that the wrapper uses the CPU
    torch.manual_seed(0)
    net, record, rows = Net(), [], []
    inputs, labels = torch.randn(12, 6), torch.randn(12, 3)
    on_cpu = nn.DataParallel(net, device_ids=[0, 1, 2, 3])
    print(f"device_ids on a CPU: {on_cpu.device_ids}\n")
    replicated = DataParallel(net, REPLICAS, record)
    for name, wrapped in (
        ("`nn.DataParallel` on a CPU: only calls the module", on_cpu),
        ("reimplementation", replicated),
    ):
        CALLS.clear()
        for _ in range(STEPS):
            loss = mse_loss(wrapped(inputs), labels) + wrapped.module.kernel_distance()
            loss.backward()
        for code in ("forward", "kernel_distance"):
            threads = [thread for called, thread, _ in CALLS if called == code]
            names = ", ".join(sorted(set(threads)))
            processes = len({process for *_, process in CALLS})
            rows.append([name, f"`{code}`", len(threads), names, processes])
    print(table(["two steps with", "code", "calls", "threads", "processes"], rows))
    replications = sum(event.phase == "replicate" and event.replica == 0 for event in record)
    print(f"\nReplications in {STEPS} steps: {replications}")


if __name__ == "__main__":
    main()

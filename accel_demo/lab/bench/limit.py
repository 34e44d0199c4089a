"""Compare the FLOP/s of a training step with the fastest matrix product on this machine.

accel-demo bench limit
accel-demo bench limit --precision no --plot limit.svg

FLOP/s means floating-point operations per second. torch.utils.flop_counter counts these operations
in a step, but only for convolutions and matrix products. The reference is the fastest product of
two square matrices, measured in the same process with the same precision and number of threads. On
a CPU, a profile shows how long each kind of operator takes in a step.
"""

import json
import math
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stderr, redirect_stdout

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from accel_demo.config import TrainConfig
from accel_demo.lab import machine, pool_worker
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.timed_command import run_timed
from accel_demo.lab.worker_pool import WorkerResult
from accel_demo.models import make_model
from accel_demo.processes.devices import own_device
from accel_demo.wording import counted

REPEATS = 7
STEPS, WARM_UP = 50, 5  # steps per run, and how many of them are warm-up
PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16}

# {kind of operator: name prefixes}. An operator belongs to the first kind for which its own name,
# or the name of an operator that called it, starts with one of the prefixes.
KINDS = {
    "optimizer": ("Optimizer.",),
    "data": ("enumerate(DataLoader)",),
    "convolutions": ("convolution", "mkldnn_convolution", "conv2d"),
    "matrix products": ("linear", "mm", "addmm"),
    "pooling": ("max_pool2d", "avg_pool2d"),
    "batch normalization": ("batch_norm", "native_batch_norm"),
    "activations": ("threshold", "clamp_min", "relu"),
    "dropout": ("dropout", "bernoulli_", "native_dropout"),
    "clipping": ("linalg_vector_norm", "_foreach", "stack", "clamp", "mul_"),
}


def add_options(parser: ArgumentParser) -> None:
    help = "mixed precision; no means fp32 (default: bf16 if the hardware supports it, else no)"
    parser.add_argument("--precision", choices=PRECISIONS, default=None, help=help)


def measure(options: Namespace) -> Report:
    """Compare training steps with matrix products. On a CPU, also profile a step."""
    device = own_device()
    has_bf16 = device.type != "cpu" or machine.has_bf16_instructions()
    precision = options.precision or ("bf16" if has_bf16 else "no")
    name = {"no": "fp32", "bf16": "bf16"}[precision]
    torch.backends.cudnn.allow_tf32 = False  # like matrix products, which use no TF32 by default
    config = TrainConfig()
    flops = flops_of_step(config)
    every_thread = torch.get_num_threads()
    thread_counts = sorted({1, every_thread}) if device.type == "cpu" else [every_thread]
    tables, findings = [], []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        place = counted(threads, "thread") if device.type == "cpu" else "GPU"
        rows: dict[str, list[float]] = {"matrix products": [], "training steps": []}
        for _ in tqdm(range(options.repeats), desc=place, unit="repeat"):
            rows["matrix products"].append(matrix_rate(PRECISIONS[precision], device) / 1e9)
            seconds = train_plain(config, precision)["seconds_per_step"]
            rows["training steps"].append(flops / seconds / 1e9)
        table = Table(f"{config.model} in {name}, {place}", "GFLOP/s", rows, "matrix products")
        share = table.rows["training steps"].median_ratio
        findings.append(f"{place}: a step reaches {share:.0%} of the matrix-product rate.")
        tables.append(table)
    torch.set_num_threads(every_thread)
    if device.type == "cpu":  # not on a GPU, where kernels and Python run at the same time
        # Profile in a new process, to hide the stderr output of the profiler's C++ code.
        command = ["python", "-m", "accel_demo.lab.bench.limit", precision]
        *_, line = run_timed(command, OMP_NUM_THREADS=str(every_thread)).printed_lines
        title = f"Where a step's time goes, {place}, under the profiler"
        tables.append(Table(title, "%", json.loads(line)))
    findings.append(
        f"A step is {flops / 1e9:.2f} GFLOP: {flops / config.batch_size / 1e6:.1f} MFLOP per image."
    )
    if not has_bf16:
        findings.append("This CPU has no bf16 instructions: torch can only emulate bf16, slowly.")
    return Report(tables, findings, {"flops_per_step": flops})


def flops_of_step(config: TrainConfig) -> int:
    """Count the floating-point operations of one forward and backward pass on a batch."""
    model, labels = make_model(config), torch.zeros(config.batch_size, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(torch.rand(config.batch_size, 1, 28, 28)), labels).backward()
    return counter.get_total_flops()


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Multiply square matrices of several sizes, and return the highest FLOP/s."""
    sizes, products = ((512, 1024, 2048), 1) if device.type == "cpu" else ((4096, 8192), 20)
    best = math.inf
    for size in sizes:
        a, b, c = torch.rand(3, size, size, device=device).to(dtype)
        for _ in range(3):
            wait_for(device)
            started_at = time.perf_counter()
            for _ in range(products):
                torch.mm(a, b, out=c)
            wait_for(device)
            seconds = (time.perf_counter() - started_at) / products
            best = min(best, seconds / (2 * size**3))
    return 1 / best


def profile_of_step(config: TrainConfig, precision: str) -> dict[str, list[float]]:
    """Profile train_plain.py. Return {kind of operator: [percentage of the step time]}."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train_plain(config, precision)
    events = profiler.events() or []
    ends = sorted(e.time_range.end for e in events if e.name.startswith("Optimizer.step#"))
    start, end = ends[WARM_UP - 1], ends[-1]
    shares = dict.fromkeys([*KINDS, "other operators"], 0.0)
    for event in events:
        if start <= event.time_range.start < end:
            shares[kind_of(event)] += 100 * event.self_cpu_time_total / (end - start)
    shares["Python between the operators"] = 100 - sum(shares.values())
    return {kind: [share] for kind, share in shares.items()}


def kind_of(event) -> str:
    """Return the key of `KINDS` that matches a profiler event, or "other operators"."""
    names = []
    while event is not None:
        names.append(event.name.removeprefix("aten::"))
        event = event.cpu_parent
    for kind, starts in KINDS.items():
        if any(name.startswith(starts) for name in names):
            return kind
    return "other operators"


def train_plain(config: TrainConfig, precision: str) -> WorkerResult:
    """Run train_plain.py on synthetic images in this process, and return its step times."""
    with (
        tempfile.TemporaryDirectory() as run_dir,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        choices = {"model": config.model, "dataset": "synthetic", "max_steps": STEPS}
        choices |= {"train_samples": STEPS * config.batch_size, "test_samples": 1}
        choices |= {"run_dir": run_dir}
        return pool_worker.run("plain PyTorch", choices, precision, warm_up=WARM_UP)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that the measured time includes this work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    print(json.dumps(profile_of_step(TrainConfig(), sys.argv[1])))

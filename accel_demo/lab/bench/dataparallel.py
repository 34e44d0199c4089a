"""Compare the speed of nn.DataParallel and DistributedDataParallel on the same devices.

accel-demo bench dataparallel
accel-demo bench dataparallel --quick --model tiny_cnn
accel-demo bench dataparallel --forward

Plain PyTorch, nn.DataParallel and raw DDP train the same model with the same global batch size.
Their runs alternate. nn.DataParallel uses one process with one thread per GPU; with fewer than two
GPUs, it only calls the module that it wraps. Raw DDP uses two processes. Each trains on half of
the batch, on its own GPU or with half of the CPU threads.

--forward does not use the train files. It measures the forward pass alone, with and without Python
code in it. Without GPUs, our own DataParallel replaces nn.DataParallel, because it runs two
replicas in two threads even on a CPU.
"""

from argparse import Namespace

from accel_demo.config import IMAGE_MODELS, TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.machine import usable_cores
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool
from accel_demo.options import Parser
from accel_demo.progress_bar import ProgressBar
from accel_demo.slow_imports import without_garbage_collection

REPEATS = 9
STEPS, WARM_UP = 40, 4  # steps per run, and how many of them are warm-up
PLAIN, DATA_PARALLEL, DDP = "plain PyTorch", "nn.DataParallel", "raw DDP"


def add_options(parser: Parser) -> None:
    help = "the model to train (default: small_cnn)"
    parser.add_argument("--model", default="small_cnn", choices=IMAGE_MODELS, help=help)
    help = "images per optimizer step over all devices (default: 256)"
    parser.add_argument("--global-batch", type=int, default=256, metavar="N", help=help)
    help = "compare forward passes with and without Python code in them"
    parser.add_argument("--forward", action="store_true", help=help)


def measure(options: Namespace) -> Report:
    batch = options.global_batch
    if batch < 2 or batch % 2:
        raise UserError(f"--global-batch must be a positive even number, got {batch}")
    if options.forward:
        from accel_demo.lab.bench import forward  # slow: imports torch

        return forward.measure(options.model, batch, options.repeats)
    choices = {"model": options.model, "dataset": "synthetic", "max_steps": STEPS}
    choices |= {"train_samples": STEPS * batch, "test_samples": 64}
    batch_sizes = {PLAIN: batch, DATA_PARALLEL: batch, DDP: batch // 2}
    TrainConfig(**choices, batch_size=batch)  # checks the options before any process is started
    with without_garbage_collection():
        import torch

    on_cpu = torch.cuda.device_count() < 2
    one_gpu, both_gpus = (ON_CPU, ON_CPU) if on_cpu else ("0", "0,1")
    threads = max(2, usable_cores() // 2 * 2)  # even: each of the two DDP processes gets half
    rates: dict[str, list[float]] = {PLAIN: [], DATA_PARALLEL: [], DDP: []}
    with (
        WorkerPool(1, threads, one_gpu) as alone,
        WorkerPool(1, threads, both_gpus) as threaded,
        WorkerPool(2, threads // 2, both_gpus) as pair,
    ):
        pools = {PLAIN: alone, DATA_PARALLEL: threaded, DDP: pair}
        for name, pool in pools.items():  # not measured, because the first step imports modules
            pool.run(name, {**choices, "max_steps": 2, "batch_size": batch_sizes[name]})
        for repeat in ProgressBar("dataparallel", "repeat", range(options.repeats)):
            for name in list(pools) if repeat % 2 else list(pools)[::-1]:
                fields = {**choices, "batch_size": batch_sizes[name]}
                result = pools[name].run(name, fields, warm_up=WARM_UP)
                images = result["processes"] * batch_sizes[name]
                rates[name].append(images / result["seconds_per_step"])
    place = f"the CPU, {threads} threads in all" if on_cpu else "two GPUs"
    title = f"Training {options.model}, {batch} images per step on {place}"
    table = Table(title, "images/s", rates, DATA_PARALLEL, digits=0)
    ratio = table.rows[DDP].median_ratio
    finding = f"DDP with two processes reaches {ratio:.2f} times the speed of nn.DataParallel"
    finding += ", which here only calls the module." if on_cpu else "."
    return Report([table], [finding], {"processes": pair.processes})

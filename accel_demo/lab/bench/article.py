"""Compare how fast our training loop and an article's loop train ResNet-101.

accel-demo bench article
accel-demo bench article --repeats 1 --steps 3

The article inspired this course. Its loop (article_loop.py) trains in fp32 with PyTorch's default
memory format, reads images one by one with torchvision, and calls `loss.item()` every ten steps.
Our loop is train.py under `accelerate launch`. It uses the channels-last memory format, reads whole
batches, keeps losses on the device, and reuses freed memory. It runs in fp32, and in bf16 unless
the CPU lacks bf16 instructions. On a GPU, it also runs in bf16 with torch.compile.

Both loops train with Adam on 256 packaged images per step, on the same cores or GPU. The first
sixth of the steps (at least two, at most ten) is not measured. The losses do not show which loop
learns better, because only our loop has a learning rate schedule (one-cycle), and the loops
normalize the images differently.
"""

import json
import statistics
from argparse import ArgumentParser, Namespace

from tqdm import tqdm

from accel_demo.lab import machine
from accel_demo.lab.bench.article_loop import BATCH_SIZE, LoopResult, warm_up_steps
from accel_demo.lab.measurements import Report, Table, threads_of_a_command
from accel_demo.lab.timed_command import accelerate_launch, run_timed, time_training
from accel_demo.processes.devices import own_device

REPEATS = 5
QUICK = {"steps": 3}
ARTICLE = "the article's loop"
FLAGS = f"--model resnet101 --batch-size {BATCH_SIZE} --optimizer adam --learning-rate 1e-3"
FLAGS += " --label-smoothing 0 --weight-decay 0 --warmup 0 --dropout 0 --test-samples 500"


def add_options(parser: ArgumentParser) -> None:
    help = "optimizer steps per run (default: 4 on a CPU, 60 on a GPU)"
    parser.add_argument("--steps", type=int, metavar="N", help=help)


def measure(options: Namespace) -> Report:
    """Train with both loops once for each seed, and compare their speeds."""
    device = own_device().type
    steps = (4 if device == "cpu" else 60) if options.steps is None else options.steps
    warm_up_steps(steps)  # checks --steps before any process is started
    launches = our_launches(device)
    rates: dict[str, list[float]] = {name: [] for name in (ARTICLE, *launches)}
    losses: dict[str, list[float]] = {name: [] for name in rates}
    with tqdm(total=options.repeats * len(rates), unit="run", leave=False) as bar:
        for seed in range(options.repeats):
            bar.set_description(ARTICLE)
            results = {ARTICLE: train_article(steps, seed)}
            for name, (precision, flags) in launches.items():
                bar.update()
                bar.set_description(name)
                results[name] = train_ours(precision, flags, steps, seed)
            bar.update()
            for name, result in results.items():
                check_alike(result, results[ARTICLE], device)
                rates[name].append(result.images_per_second)
                losses[name].append(result.mean_loss)
    table = Table("Training ResNet-101", "images/s", rates, reference=ARTICLE)
    ratios = {name: table.rows[name].median_ratio for name in launches}
    mean_losses = {name: statistics.median(values) for name, values in losses.items()}
    facts = {f"mean loss, {name}": loss for name, loss in mean_losses.items()}
    return Report([table], findings(ratios, mean_losses, steps), {**facts})


def our_launches(device: str) -> dict[str, tuple[str, list[str]]]:
    """Return {table row: (mixed precision, extra train.py flags)} for our loop."""
    launches: dict[str, tuple[str, list[str]]] = {"ours, fp32": ("no", [])}
    if device != "cpu" or machine.has_bf16_instructions():
        launches["ours, bf16"] = ("bf16", [])
    if device != "cpu":
        launches["ours, bf16, compiled"] = ("bf16", ["--compile"])
    return launches


def train_article(steps: int, seed: int) -> LoopResult:
    command = ["python", "-m", "accel_demo.lab.bench.article_loop"]
    command += ["--steps", str(steps), "--seed", str(seed)]
    timed = run_timed(command, on_cpu=False, OMP_NUM_THREADS=threads_of_a_command())
    return LoopResult(**json.loads(timed.printed_lines[-1]))


def train_ours(precision: str, flags: list[str], steps: int, seed: int) -> LoopResult:
    """Run train.py, and read speed and loss from its run folder."""
    config = "cpu" if own_device().type == "cpu" else "single_gpu"
    command = accelerate_launch(f"{config}.yaml", "--mixed_precision", precision)
    command += ["accel_demo/train.py", *FLAGS.split(), *flags, "--seed", str(seed)]
    command += ["--max-steps", str(steps), "--epochs", str(steps)]
    command += ["--log-every", str(warm_up_steps(steps))]
    run = time_training(command, 1, on_cpu=False, OMP_NUM_THREADS=threads_of_a_command())
    warm_up, *intervals = (line for _, line in run.metrics if "train_loss" in line)
    seconds, loss, steps_done = 0.0, 0.0, warm_up["step"]
    for line in intervals:
        interval, steps_done = line["step"] - steps_done, line["step"]
        seconds += interval * BATCH_SIZE / line["images_per_second"]
        loss += interval * line["train_loss"]
    measured = steps - warm_up["step"]
    return LoopResult(
        images_per_second=measured * BATCH_SIZE / seconds,
        mean_loss=loss / measured,
        device=run.environment["device"],
        threads=run.environment["threads_per_process"],
    )


def check_alike(result: LoopResult, article: LoopResult, device: str) -> None:
    """Raise `RuntimeError` unless the run used `device` and as many threads as `article`."""
    expected, actual = (device, article.threads), (result.device, result.threads)
    if actual != expected:
        raise RuntimeError(f"device and threads should have been {expected}, but were {actual}")


def findings(ratios: dict[str, float], losses: dict[str, float], steps: int) -> list[str]:
    best = max(ratios, key=lambda name: ratios[name])
    precision = best.removeprefix("ours, ")
    sentences = [
        f"Our loop in {precision}: {ratios[best]:.1f} x the images/s of the article's loop."
    ]
    if list(ratios) == ["ours, fp32"]:
        sentences.append(
            "This CPU has no bf16 instructions, so our loop ran only in fp32. On a CPU that has "
            "them, bf16 may be faster."
        )
    values = "; ".join(f"{name} {value:.2f}" for name, value in losses.items())
    first = warm_up_steps(steps) + 1
    sentences.append(f"Mean training loss of steps {first} to {steps}: {values}.")
    return sentences

"""ResNet-101 as an article trains it, against the same network in our loop.

accel-demo bench article
accel-demo bench article --repeats 1 --steps 3

The article's loop (article_loop.py): fp32, images contiguous in memory and read one by one through
torchvision, `loss.item()` every ten steps. Ours is train.py under `accelerate launch`: channels
last, whole batches read at once, the losses left on the device, freed memory kept, and bf16 where
the processor multiplies it. Both train on the packaged images, 256 a step, with Adam, on the same
cores or the same GPU. The first sixth of the steps (two to ten) is warm-up and does not count.

The article's learning rate is constant and ours falls to zero (one cycle), and the images are
normalised differently: the losses do not show which one learns better.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path

from tqdm import tqdm

from accel_demo.lab import machine
from accel_demo.lab.bench.article_loop import BATCH_SIZE, warm_up_steps
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.timed_command import accelerate_launch, run_timed
from accel_demo.processes.connect import own_device

REPEATS = 5
ARTICLE = "the article's loop"
FLAGS = f"--model resnet101 --batch-size {BATCH_SIZE} --optimizer adam --learning-rate 1e-3"
FLAGS += " --label-smoothing 0 --weight-decay 0 --warmup 0 --dropout 0 --test-samples 500"


def add_options(parser) -> None:
    help = "optimizer steps of each training (default: 4 on a CPU, 60 on a GPU)"
    parser.add_argument("--steps", type=int, metavar="N", help=help)


def measure(options) -> Report:
    """Train in every way, in turns, each repeat from another seed."""
    device = own_device().type
    steps = (4 if device == "cpu" else 60) if options.steps is None else options.steps
    warm_up_steps(steps)  # now, if it is an error
    ways = our_ways(device)
    rates: dict[str, list[float]] = {name: [] for name in (ARTICLE, *ways)}
    losses: dict[str, list[float]] = {name: [] for name in rates}
    with tqdm(total=options.repeats * len(rates), unit="run", leave=False) as bar:
        for seed in range(options.repeats):
            for name in rates:
                bar.set_description(name)
                if name == ARTICLE:
                    found = theirs = train_theirs(steps, seed)
                else:
                    found = train_ours(ways[name], steps, seed)
                check_alike(found, theirs, device)
                rates[name].append(found["images_per_second"])
                losses[name].append(found["loss"])
                bar.update()
    table = Table("Training ResNet-101", "images/s", rates, reference=ARTICLE)
    ratio = {name: statistics.median(table.ratios(name)) for name in ways}
    loss = {name: statistics.median(values) for name, values in losses.items()}
    return Report("article", [table], findings(ratio, loss, steps), {"ratio": ratio, "loss": loss})


def our_ways(device: str) -> dict[str, tuple[str, ...]]:
    """The rows of our loop: the precision of the launch, then further flags of train.py."""
    ways: dict[str, tuple[str, ...]] = {"ours, fp32": ("no",)}
    if device != "cpu" or machine.has_bf16_instructions():
        ways["ours, bf16"] = ("bf16",)
    if device != "cpu":
        ways["ours, bf16, compiled"] = ("bf16", "--compile")
    return ways


def train_theirs(steps: int, seed: int) -> dict:
    """The article's loop: images_per_second, loss, device and threads."""
    command = ["python", "-m", "accel_demo.lab.bench.article_loop"]
    return json.loads(output_of([*command, "--steps", str(steps), "--seed", str(seed)])[-1])


def train_ours(way: tuple[str, ...], steps: int, seed: int) -> dict:
    """The same of train.py, from the files of its run."""
    precision, *flags = way
    config = "cpu" if own_device().type == "cpu" else "single_gpu"
    command = accelerate_launch(f"{config}.yaml", "--mixed_precision", precision)
    command += ["accel_demo/train.py", *FLAGS.split(), *flags]
    command += ["--max-steps", str(steps), "--epochs", str(steps), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as run:
        first, *_ = output_of(
            [*command, "--log-every", str(warm_up_steps(steps)), "--run-dir", run]
        )
        environment = json.loads(Path(run, "environment.json").read_text())
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    if not first.startswith("1 process on "):
        raise RuntimeError(f"train.py was to be one process, but it says: {first}")
    warm_up, *intervals = (line for line in lines if "train_loss" in line)
    measured = steps - warm_up["step"]
    seconds, loss, done = 0.0, 0.0, warm_up["step"]
    for line in intervals:
        interval, done = line["step"] - done, line["step"]
        seconds += interval * BATCH_SIZE / line["images_per_second"]
        loss += interval * line["train_loss"]
    return {
        "images_per_second": measured * BATCH_SIZE / seconds,
        "loss": loss / measured,
        "device": environment["device"],
        "threads": environment["threads_per_process"],
    }


def output_of(command: list[str]) -> list[str]:
    """The lines it prints; on the CPU it may use every core, unless OMP_NUM_THREADS says less."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(machine.usable_cores())
    timed = run_timed(command, on_cpu=False, OMP_NUM_THREADS=threads)
    return [line for _, line in timed.lines]


def check_alike(found: dict, theirs: dict, device: str) -> None:
    """Raise `RuntimeError` where a training ran on something else than the article's loop."""
    for name, value in (("device", device), ("threads", theirs["threads"])):
        if found[name] != value:
            raise RuntimeError(f"{name} should have been {value}, but was {found[name]}")


def findings(ratio: dict[str, float], loss: dict[str, float], steps: int) -> list[str]:
    """What the medians say, in sentences."""
    best = max(ratio, key=lambda name: ratio[name])
    precision = best.removeprefix("ours, ")
    sentences = [
        f"Our loop in {precision}: {ratio[best]:.1f} x the images/s of the article's loop."
    ]
    if list(ratio) == ["ours, fp32"]:
        sentences.append(
            "This CPU has no bf16 instructions, so our loop ran in fp32 alone: "
            "most of what it gains on a CPU needs them."
        )
    said = "; ".join(f"{name} {value:.2f}" for name, value in loss.items())
    first = warm_up_steps(steps) + 1
    sentences.append(f"Mean training loss of steps {first} to {steps}: {said}.")
    return sentences

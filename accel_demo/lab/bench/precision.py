"""Measure how much faster a training step is in bf16 than in fp32, and how much less it allocates.

accel-demo bench precision
accel-demo bench precision --repeats 1 --models tiny_cnn --steps 2

For each model, one copy trains in fp32 and one with bf16 autocast. They start with the same
weights, and train on the same images in turn, a few steps at a time.
"""

from argparse import Namespace

from accel_demo.config import IMAGE_MODELS
from accel_demo.errors import UserError
from accel_demo.lab import machine
from accel_demo.lab.measurements import Report, Table
from accel_demo.options import Parser
from accel_demo.processes.memory import keep_freed_memory
from accel_demo.progress_bar import ProgressBar
from accel_demo.slow_imports import without_garbage_collection

REPEATS = 5
QUICK = {"models": ["small_cnn"]}
SETTINGS = {"fp32": "no", "bf16": "bf16"}  # {name: mixed precision}
STEPS, BATCH_SIZE = 3, 128  # steps per turn, images per step
LARGE = ("resnet18", "resnet101", "vgg11")
STEPS_OF_LARGE, BATCH_SIZE_OF_LARGE = 1, 32


def add_options(parser: Parser) -> None:
    default = ["small_cnn", "resnet18"]
    help = f"models to train, of {', '.join(IMAGE_MODELS)} (default: {' '.join(default)})"
    choices = {"choices": IMAGE_MODELS, "metavar": "MODEL"}
    parser.add_argument("--models", nargs="+", **choices, default=default, help=help)
    help = f"steps per turn (default: {STEPS}; {STEPS_OF_LARGE} for {', '.join(LARGE)})"
    parser.add_argument("--steps", type=int, metavar="N", help=help)


def measure(options: Namespace) -> Report:
    """Train each model in both settings. Report speed, memory, and how much the logits differ."""
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps must be at least 1, got {options.steps}")
    with without_garbage_collection():
        import torch

        from accel_demo.lab.bench.stepped_training import SteppedTraining, bytes_of_a_step

    torch.backends.cudnn.allow_tf32 = False  # compute fp32 convolutions without TF32
    keep_freed_memory()
    tables, memory, findings = [], {}, []
    for model in options.models:
        is_large = model in LARGE
        steps = options.steps or (STEPS_OF_LARGE if is_large else STEPS)
        batch_size = BATCH_SIZE_OF_LARGE if is_large else BATCH_SIZE
        trainings = {
            name: SteppedTraining(model, precision, batch_size)
            for name, precision in SETTINGS.items()
        }
        logits = {name: training.step() for name, training in trainings.items()}  # also a warm-up
        error = float((logits["bf16"] - logits["fp32"]).norm() / logits["fp32"].norm())
        findings.append(
            f"{model}: logits of the same weights differ from fp32's by {error:.0e} (bf16)"
        )
        speeds = {name: [] for name in SETTINGS}
        for repeat in ProgressBar(model, "repeat", range(options.repeats)):
            for name in list(SETTINGS)[:: -1 if repeat % 2 else 1]:
                speeds[name].append(trainings[name].images_per_second(steps))
        device = trainings["fp32"].device
        title = f"{model}, {batch_size} images per step, on {device}"
        tables.append(Table(title, "images/s", speeds, "fp32"))
        for name, training in trainings.items():
            memory[f"{model}, {name}"] = [bytes_of_a_step(training) / 1e6]
    if device.type == "cpu":
        has = "has" if machine.has_bf16_instructions() else "has no"
        findings.append(f"This CPU {has} bf16 instructions.")
    title = "Most that a step allocates, without weights and optimizer state"
    return Report([*tables, Table(title, "MB", memory)], findings)

"""The options of a training run. Each field of `TrainConfig` becomes a flag of the train files.

For example, the field `batch_size` becomes `--batch-size`. These options define what to train. The
files in accelerate_configs/ define how to launch the run: processes, devices and precision. No
option appears in both places.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import shlex
import sys
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from accel_demo.errors import UserError
from accel_demo.options import Parser

DATASETS = ("fashion-mnist-small", "fashion-mnist", "mnist", "cifar10", "synthetic", "text")
IMAGE_MODELS = ("small_cnn", "tiny_cnn", "resnet18", "resnet101", "vgg11")
MODELS = (*IMAGE_MODELS, "tiny_gpt")
OPTIMIZERS = ("adamw", "adam", "sgd")
# Default weight decay. Adam adds it to the gradient and then divides by the gradient's usual size,
# so a value that suits AdamW is far too large for Adam.
WEIGHT_DECAY = {"adamw": 0.1, "adam": 0.0, "sgd": 5e-4}
SCHEDULES = ("one-cycle", "constant")
RULES = (  # what the values of some fields must be
    (
        "at least 1",
        lambda value: value >= 1,
        "epochs batch_size eval_batch_size accumulate log_every keep_last",
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        "train_samples test_samples max_steps num_workers seed weight_decay checkpoint_every "
        "print_every",
    ),
    ("above 0", lambda value: value > 0, "learning_rate clip_norm collective_timeout"),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "dropout label_smoothing warmup"),
    ("a finite number", math.isfinite, "learning_rate"),
    ("at most 1e6", lambda value: value <= 1e6, "collective_timeout"),
    (f"below {2**31}", lambda value: value < 2**31, "seed"),
)


def option(default, help, choices=None, fixed=True, shown_default="") -> Any:
    """Define a field of TrainConfig. `choices` lists the allowed values, if they are limited.

    If `fixed` is true, a run cannot be resumed with a different value of the field. `shown_default`
    replaces the default in the help text.
    """
    shown_default = shown_default or default or repr(default)
    metadata = {"help": f"{help} (default: {shown_default})", "choices": choices, "fixed": fixed}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """The config of a training run. The default run takes under a minute on two CPU cores."""

    dataset: str = option(
        "fashion-mnist-small", "the dataset to train on; text needs --model tiny_gpt", DATASETS
    )
    data_dir: str = option("data", "folder that contains the full datasets", fixed=False)
    train_samples: int = option(0, "use only the first N training samples; 0 means all")
    test_samples: int = option(0, "use only the first N test samples; 0 means all")
    augment: bool = option(False, "randomly shift training images by up to 2 pixels and flip them")
    model: str = option("small_cnn", "the model to train; tiny_gpt needs --dataset text", MODELS)
    dropout: float = option(
        0.0, "dropout probability before the last layer, or in all blocks of tiny_gpt"
    )
    epochs: int = option(10, "passes over the training samples")
    max_steps: int = option(0, "stop after N optimizer steps; 0 means run all epochs")
    batch_size: int = option(128, "samples per micro-batch on each process")
    eval_batch_size: int = option(500, "samples per evaluation batch on each process")
    accumulate: int = option(1, "micro-batches per optimizer step")
    optimizer: str = option("adamw", "the optimizer; sgd uses Nesterov momentum 0.9", OPTIMIZERS)
    learning_rate: float = option(0.01, "peak learning rate; use about 0.1 with sgd")
    schedule: str = option(
        "one-cycle", "one-cycle warms up and then decays to 0; constant does neither", SCHEDULES
    )
    warmup: float = option(0.25, "fraction of the steps over which one-cycle warms up")
    weight_decay: float = option(
        None,  # __post_init__ replaces it with a number
        "weight decay",
        shown_default="; ".join(f"{value:g} with {name}" for name, value in WEIGHT_DECAY.items()),
    )
    label_smoothing: float = option(0.1, "label smoothing in the training loss")
    clip_norm: float = option(1.0, "maximum gradient norm; larger gradients are scaled down")
    seed: int = option(0, "seed for initial weights, shuffling, dropout and augmentation")
    num_workers: int = option(0, "DataLoader workers per training process", fixed=False)
    compile: bool = option(False, "compile the model with torch.compile")
    log_every: int = option(10, "optimizer steps between lines in metrics.jsonl")
    print_every: int = option(
        0,
        "print the mean training loss every N optimizer steps; 0 means only after each epoch",
        fixed=False,
    )
    track: str = option(
        "no",
        "also write the metrics to the folder tensorboard in the run folder; to show all runs, "
        "type: tensorboard --logdir runs",
        ("no", "tensorboard"),
    )
    checkpoint_every: int = option(
        0, "save a checkpoint every N optimizer steps, as well as after every epoch", fixed=False
    )
    keep_last: int = option(2, "number of checkpoints to keep", fixed=False)
    resume: str = option(
        "", "checkpoint folder to continue from; auto means the latest", fixed=False
    )
    collective_timeout: float = option(
        600.0, "seconds to wait for other processes before failing", fixed=False
    )
    run_dir: str = option(
        "",
        "folder of this run; empty means a folder in runs/. A finished run in this folder is "
        "renamed first, for example from runs/train to runs/train.1",
        fixed=False,
    )

    def __post_init__(self):
        if self.weight_decay is None:
            default = WEIGHT_DECAY.get(self.optimizer, 0.0)  # an unknown optimizer is refused below
            object.__setattr__(self, "weight_decay", default)  # the dataclass is frozen
        for field in dataclasses.fields(self):
            value, name = getattr(self, field.name), field.name
            choices = field.metadata["choices"]
            if choices and value not in choices:
                raise UserError(f"{name} must be one of {', '.join(choices)}, got {value}")
        for must_be, is_met, names in RULES:
            for name in names.split():
                if not is_met(getattr(self, name)):
                    raise UserError(f"{name} must be {must_be}, got {getattr(self, name)}")
        if (self.model == "tiny_gpt") != (self.dataset == "text"):
            raise UserError(
                f"{self.model} cannot be trained on {self.dataset}. Use --model tiny_gpt with "
                "--dataset text, and any other model with images."
            )
        if self.augment and self.dataset == "text":
            raise UserError("--augment changes images, not text. Leave it out.")
        # Batch norm needs two values per channel, but a resnet reduces each image to one pixel.
        if self.model.startswith("resnet") and self.batch_size < 2:
            raise UserError(
                f"{self.model} needs batches of at least two images, got --batch-size 1"
            )

    @property
    def sample(self) -> str:
        """What the dataset calls one sample: "image", or "sequence" of characters."""
        return "sequence" if self.dataset == "text" else "image"

    @property
    def counted_unit(self) -> str:
        """What has a label, and is counted in a run's metrics: "image" or "character"."""
        return "character" if self.dataset == "text" else "image"

    def fixed_choices(self) -> dict:
        """Return the options that identify a run. They must not change when the run is resumed."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if f.metadata["fixed"]}

    def steps_per_epoch(self, batches_per_epoch: int) -> int:
        """Return the number of optimizer steps in an epoch.

        `batches_per_epoch` is the number of micro-batches on each process.
        """
        return math.ceil(batches_per_epoch / self.accumulate)

    def total_steps(self, batches_per_epoch: int) -> int:
        """Return the number of optimizer steps in the whole run."""
        return min(
            self.epochs * self.steps_per_epoch(batches_per_epoch), self.max_steps or sys.maxsize
        )


class CommandLine(Parser):
    """The command-line parser of the train files, with one flag for each field of TrainConfig.

    If `precision` is true, the flag `--mixed-precision` is added. A program that uses Accelerate
    does not need this flag, because Accelerate reads the precision from the launch config.
    """

    def __init__(self, description: str | None, precision: bool = False):
        epilog = "There is no --local-rank: torchrun sets the environment variable LOCAL_RANK."
        super().__init__(description, epilog=epilog)
        if precision:
            help = "precision of the forward and backward pass (default: no, which means fp32)"
            choices = ("no", "bf16", "fp16")
            self.add_argument("--mixed-precision", default="no", choices=choices, help=help)
        else:
            self.flags_of_launcher = {
                "--mixed-precision": "`accelerate launch --mixed_precision`",
                "--processes": "`accelerate launch --num_processes`",
            }
        for field in dataclasses.fields(TrainConfig):
            flag = "--" + field.name.replace("_", "-")
            help = field.metadata["help"]
            if field.type is bool:
                action = argparse.BooleanOptionalAction
                self.add_argument(flag, action=action, default=field.default, help=help)
            else:
                choices = field.metadata["choices"]
                metavar = None if choices else cast(type, field.type).__name__.upper()
                if field.name == "dataset":  # too many names for one line of the usage
                    metavar = "NAME"
                    help = help.replace("train on", f"train on: {', '.join(DATASETS)}")
                self.add_argument(
                    flag,
                    type=field.type,
                    default=field.default,
                    choices=choices,
                    metavar=metavar,
                    help=help,
                )

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with this message, or with advice if an old launcher added a flag.

        `python -m torch.distributed.launch` adds `--local-rank=0` to the program's arguments.
        """
        if re.search("unrecognized arguments:.* --local[-_]rank", message):
            processes = os.environ.get("LOCAL_WORLD_SIZE", "2")
            launch = f"torchrun --nproc-per-node {processes} {shlex.quote(sys.argv[0])}"
            message = (
                f"there is no --local-rank. Use `{launch}`, which sets the environment variable "
                "LOCAL_RANK instead."
            )
        super().error(message)

    def read(self, arguments: list[str] | None = None) -> tuple[TrainConfig, argparse.Namespace]:
        """Return the config and all parsed options, including those that a train file has added.

        `arguments` defaults to `sys.argv[1:]`. Raises `UserError` if a value is not allowed.
        """
        options = self.parse_args(arguments)
        names = [field.name for field in dataclasses.fields(TrainConfig)]
        config = TrainConfig(**{name: getattr(options, name) for name in names})
        if config.track == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
            raise UserError("--track tensorboard needs TensorBoard. Run `pip install tensorboard`.")
        return config, options

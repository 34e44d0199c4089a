"""Measure how bf16 and torch.compile affect speed, memory and loss, and how long compiling takes.

accel-demo bench precision
accel-demo bench precision --repeats 1 --models tiny_cnn --steps 2 --no-compiled

In every setting, the model starts with the same weights and trains on the same images. Each
setting has its own process, and the processes train alternately, a few steps at a time. The first
step is reported separately because it includes compilation, which starts with an empty cache. Large
models take minutes to compile, so they are compiled only with --compile-large.
"""

import os
import shutil
import signal
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from accel_demo import show
from accel_demo.config import MODELS
from accel_demo.errors import UserError
from accel_demo.lab import machine
from accel_demo.lab.bench import precision_training
from accel_demo.lab.measurements import Report, Table, median_interval
from accel_demo.options import Parser
from accel_demo.processes.cleanup import kill_tree, sigterm_raises
from accel_demo.processes.devices import own_device

REPEATS = 5
QUICK = {"models": ["small_cnn"], "no_compiled": True}
SETTINGS = {  # {name: (mixed precision, is_compiled)}
    "fp32": ("no", False),
    "bf16": ("bf16", False),
    "fp32, compiled": ("no", True),
    "bf16, compiled": ("bf16", True),
}
STEPS, BATCH_SIZE = 3, 128  # steps per turn, images per step
LARGE = ("resnet18", "resnet101", "vgg11")
STEPS_OF_LARGE, BATCH_SIZE_OF_LARGE = 1, 32


@dataclass(frozen=True)
class PrecisionRun:
    """Result of training one model in one setting. The lists do not include the first step."""

    batch_size: int
    first_step_seconds: float
    seconds_per_step: list[float]  # one mean per turn
    losses: list[float]  # one per step
    last_turn_loss: float  # mean over the steps of the last turn
    megabytes: float  # peak memory that a step allocates
    logits_error: float  # in the first step: |logits - fp32 logits| / |fp32 logits|

    @property
    def images_per_second(self) -> list[float]:
        return [self.batch_size / seconds for seconds in self.seconds_per_step]


@dataclass(kw_only=True)
class PrecisionReport(Report):
    """A report that also contains every run, as `runs[model][setting]`."""

    runs: dict[str, dict[str, PrecisionRun]]

    def draw(self, path: Path) -> None:
        draw(self.runs, path)


def add_options(parser: Parser) -> None:
    default = ["small_cnn", "resnet18"]
    help = f"models to train (default: {' '.join(default)})"
    parser.add_argument("--models", nargs="+", choices=MODELS, default=default, help=help)
    help = f"steps per turn (default: {STEPS}; {STEPS_OF_LARGE} for {', '.join(LARGE)})"
    parser.add_argument("--steps", type=int, metavar="N", help=help)
    compiling = parser.add_mutually_exclusive_group()
    help = "skip torch.compile, which is slow and needs a C++ compiler on a CPU"
    compiling.add_argument("--no-compiled", action="store_true", help=help)
    help = f"also compile {', '.join(LARGE)}, which takes minutes"
    compiling.add_argument("--compile-large", action="store_true", help=help)


def measure(options: Namespace) -> Report:
    """Train each model in each setting, and report speed, memory, loss and compile time."""
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps must be at least 1, got {options.steps}")
    device = own_device()
    settings = {model: settings_for(model, options) for model in options.models}
    if any(is_compiled for chosen in settings.values() for _, is_compiled in chosen.values()):
        check_compiler(device)
    runs, findings = {}, []
    for model in settings:
        is_large = model in LARGE
        steps = options.steps or (STEPS_OF_LARGE if is_large else STEPS)
        batch_size = BATCH_SIZE_OF_LARGE if is_large else BATCH_SIZE
        with sigterm_raises(KeyboardInterrupt):
            runs[model] = compare(model, settings[model], options.repeats, steps, batch_size)
        findings += sentences(model, runs[model])
    if device.type == "cpu":
        has = "has" if machine.has_bf16_instructions() else "has no"
        findings.append(f"This CPU {has} bf16 instructions.")
    return PrecisionReport(tables_of(runs, device), findings, runs=runs)


def settings_for(model: str, options: Namespace) -> dict[str, tuple[str, bool]]:
    """Return `SETTINGS`, without the compiled ones if this model is not to be compiled."""
    compiles = options.compile_large or not (options.no_compiled or model in LARGE)
    return {name: setting for name, setting in SETTINGS.items() if compiles or not setting[1]}


def check_compiler(device: torch.device) -> None:
    """Raise `UserError` if the device is a CPU and torch.compile finds no C++ compiler."""
    names = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    if device.type == "cpu" and not any(map(shutil.which, names)):
        raise UserError(
            "torch.compile needs a C++ compiler on a CPU, but none was found. Install g++ or "
            "clang++, or add --no-compiled."
        )


def compare(
    model: str, settings: dict[str, tuple[str, bool]], repeats: int, steps: int, batch_size: int
) -> dict[str, PrecisionRun]:
    """Train the model in all settings alternately. Return {setting: run}."""
    processes, first_steps = {}, {}
    turns: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in settings}
    bar = tqdm(total=len(settings) * (repeats + 1), desc=model, unit="turn")
    with bar, ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        for number, (name, (precision, is_compiled)) in enumerate(settings.items()):
            process = processes[name] = stack.enter_context(worker())
            folder = str(Path(cache, str(number)))  # has no spaces, which Inductor cannot handle
            arguments = (model, precision, is_compiled, batch_size, torch.get_num_threads(), folder)
            first_steps[name] = process.submit(precision_training.begin, *arguments).result()
            bar.update()
        names = list(settings)
        for repeat in range(repeats):
            shift = repeat % len(names)  # so that each repetition starts with a different setting
            for name in names[shift:] + names[:shift]:
                turns[name].append(processes[name].submit(precision_training.turn, steps).result())
                bar.update()
        step_bytes = {
            name: process.submit(precision_training.bytes_of_a_step).result()
            for name, process in processes.items()
        }
    runs = {}
    fp32_logits = torch.tensor(first_steps["fp32"][1])
    for name, (first_step_seconds, logits) in first_steps.items():
        losses = [loss for _, turn_losses in turns[name] for loss in turn_losses]
        runs[name] = PrecisionRun(
            batch_size=batch_size,
            first_step_seconds=first_step_seconds,
            seconds_per_step=[seconds for seconds, _ in turns[name]],
            losses=losses,
            last_turn_loss=statistics.mean(losses[-steps:]),
            megabytes=step_bytes[name] / 1e6,
            logits_error=((torch.tensor(logits) - fp32_logits).norm() / fp32_logits.norm()).item(),
        )
    return runs


@contextmanager
def worker() -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of one process. If the `with` block raises, kill the process and its children.

    The pool's process ignores Ctrl-C. If it were not killed, this program would exit only after a
    compiler in the pool had finished, which may take minutes.
    """
    options = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **options) as executor:
        process = psutil.Process(executor.submit(os.getpid).result())
        try:
            yield executor
        except BaseException:
            kill_tree(process)
            raise


def tables_of(runs: dict[str, dict[str, PrecisionRun]], device: torch.device) -> list[Table]:
    """Return a speed table for each model, and tables of memory, loss and first-step time."""
    tables = []
    for model, by_setting in runs.items():
        rows = {name: run.images_per_second for name, run in by_setting.items()}
        title = f"{model}, {by_setting['fp32'].batch_size} images per step, on {device}"
        tables.append(Table(title, "images/s", rows, "fp32"))
    every_run = {f"{model}, {name}": run for model in runs for name, run in runs[model].items()}
    memory = {name: [run.megabytes] for name, run in every_run.items()}
    losses = {name: [run.last_turn_loss] for name, run in every_run.items()}
    seconds = {name: [run.first_step_seconds] for name, run in every_run.items()}
    return [
        *tables,
        Table("Most that a step allocates, without weights and optimizer state", "MB", memory),
        Table("Loss in the last turn, after the same steps", "cross-entropy", losses, digits=3),
        Table("The first step, with compiling", "s", seconds),
    ]


def sentences(model: str, runs: dict[str, PrecisionRun]) -> list[str]:
    """Describe the compile times, and how much the logits differ from fp32 logits."""
    lines = []
    for precision in ("fp32", "bf16"):
        if compiled := runs.get(f"{precision}, compiled"):
            eager_seconds = runs[precision].seconds_per_step
            text = price(eager_seconds, compiled.seconds_per_step, compiled.first_step_seconds)
            lines.append(f"{model}, {precision}: {text}")
    errors = [f"{run.logits_error:.0e} ({name})" for name, run in runs.items() if name != "fp32"]
    lines.append(f"{model}: logits of the same weights differ from fp32's by {', '.join(errors)}")
    return lines


def price(eager: list[float], compiled: list[float], first_step: float) -> str:
    """Describe how long compiling took, and after how many steps it pays off.

    `eager` and `compiled` contain the mean seconds per step in each turn.
    """
    compiling = first_step - statistics.median(compiled)
    saved = [before - after for before, after in zip(eager, compiled, strict=True)]
    low, high = median_interval(saved) or [min(saved), max(saved)]
    text = f"compiling took {compiling:.1f} s"
    if high <= 0:
        return f"{text}, and the steps are slower: it never pays off here"
    if low <= 0:
        return f"{text}, and the steps are not reliably faster"
    median = statistics.median(saved)
    text += f" and saves {1000 * median:.1f} ms per step"
    return f"{text}: it pays off after {compiling / median:,.0f} steps"


def draw(runs: dict[str, dict[str, PrecisionRun]], path: Path) -> None:
    """Draw a column of charts for each model: speed, memory and loss curves."""
    from matplotlib.ticker import MaxNLocator

    figure = show.new_figure(1 + 2.5 * len(runs), 6.6)
    grid = figure.subplots(3, len(runs), squeeze=False, height_ratios=[3, 3, 4])
    settings = max(runs.values(), key=len)  # a model that is not compiled has fewer
    colors = dict(zip(settings, show.COLORS, strict=False))
    for (model, by_setting), column in zip(runs.items(), grid.T, strict=True):
        speed, memory, curves = column
        bars(speed, {name: run.images_per_second for name, run in by_setting.items()}, colors)
        bars(memory, {name: [run.megabytes] for name, run in by_setting.items()}, colors)
        batch_size = by_setting["fp32"].batch_size
        speed.set_title(f"{model},\n{batch_size} images per step", loc="left", fontsize=10)
        speed.set_xlabel("images/s", fontsize=9)
        memory.set_xlabel("MB that a step allocates", fontsize=9)
        # Curves may coincide, so draw each curve narrower than the previous curve.
        for width, (name, run) in zip((7, 5, 2.5, 1), by_setting.items(), strict=False):
            style = "--" if "compiled" in name else "-"
            options = {"color": colors[name], "linewidth": width, "label": name}
            curves.plot(range(2, 2 + len(run.losses)), run.losses, style, **options)
        curves.margins(y=0.3)
        curves.set_ylim(bottom=0)
        curves.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        curves.set_xlabel("step", fontsize=9)
        curves.legend(fontsize=8, frameon=False, loc="lower left")
        for axis in column:
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=9)
    for axis in grid[:2, 0]:
        axis.set_yticks(range(len(settings)), list(settings))
    grid[2, 0].set_ylabel("loss", fontsize=9)
    show.save(figure, path)


def bars(axis, rows: dict[str, list[float]], colors: dict[str, str]) -> None:
    """For each row, draw the median as a bar, and an error bar from minimum to maximum.

    A bar's place is that of its name in `colors`, so that models can be compared.
    """
    from matplotlib.ticker import MaxNLocator

    for name, values in rows.items():
        median, place = statistics.median(values), list(colors).index(name)
        spread = [[median - min(values)], [max(values) - median]] if len(values) > 1 else None
        hatch = "///" if "compiled" in name else None
        axis.barh(place, median, xerr=spread, color=colors[name], capsize=2, hatch=hatch)
        number, end = f"{median:,.0f}" if median >= 10 else f"{median:.1f}", (max(values), place)
        options = {"textcoords": "offset points", "va": "center", "fontsize": 9}
        axis.annotate(number, end, (4, 0), **options)
    for place, name in enumerate(colors):
        if name not in rows:
            options = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 9}
            axis.text(0.03, place, "not measured", **options)
    axis.set_yticks([])
    axis.set_ylim(len(colors) - 0.5, -0.5)
    axis.xaxis.set_major_locator(MaxNLocator(3))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.margins(x=0.3)
    axis.set_xlim(left=0)

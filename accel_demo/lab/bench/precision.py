"""What bf16 and torch.compile change: speed, memory and loss, and what compiling costs.

accel-demo bench precision
accel-demo bench precision --repeats 1 --models tiny_cnn --steps 2 --no-compiled

Each way trains the same network from the same weights on the same images, in a process of its own
that stays alive. The processes take turns, a few steps each. The first step is told apart: in it
torch.compile compiles, and finds nothing that was compiled before. Large networks are compiled only
where that is asked for: it takes minutes.
"""

import os
import shutil
import signal
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from accel_demo import show
from accel_demo.config import MODELS
from accel_demo.errors import UserError
from accel_demo.lab import machine
from accel_demo.lab.bench import precision_training
from accel_demo.lab.measurements import Report, Table, median_interval
from accel_demo.processes.connect import own_device
from accel_demo.processes.launch import kill_tree

REPEATS = 5
WAYS = {  # what to compute in, and whether it is compiled
    "fp32": ("no", False),
    "bf16": ("bf16", False),
    "fp32, compiled": ("no", True),
    "bf16, compiled": ("bf16", True),
}
STEPS, BATCH_SIZE = 3, 128  # of a turn, of a step
LARGE = ("resnet18", "resnet101", "vgg11")  # their steps are long, and more so with emulated bf16
STEPS_OF_LARGE, BATCH_SIZE_OF_LARGE = 1, 32
TITLES = ("images/s", "MB a step allocates at most", "first step in s", "loss")


def add_options(parser) -> None:
    default = ["small_cnn", "resnet18"]
    help = f"networks to train (default: {' '.join(default)})"
    parser.add_argument("--models", nargs="+", choices=MODELS, default=default, help=help)
    help = f"steps in a turn (default: {STEPS}; {STEPS_OF_LARGE} for {', '.join(LARGE)})"
    parser.add_argument("--steps", type=int, metavar="N", help=help)
    either = parser.add_mutually_exclusive_group()
    help = "leave torch.compile out: it takes long, and on a CPU it needs a C++ compiler"
    either.add_argument("--no-compiled", action="store_true", help=help)
    help = f"compile {', '.join(LARGE)} too: that takes minutes"
    either.add_argument("--compile-large", action="store_true", help=help)


@dataclass
class Comparison(Report):
    """`facts` has what `compare` gives, for each network: its picture shows them side by side."""

    def draw(self, path: Path) -> None:
        draw(self.facts, path)


def measure(options) -> Report:
    """Images per second in turns, memory, loss and the first step of each way, and its price."""
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps must be at least 1, got {options.steps}")
    device = own_device()
    ways = {model: ways_of(model, options) for model in options.models}
    if any(is_compiled for some in ways.values() for _, is_compiled in some.values()):
        check_compiler(device)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    found, findings = {}, []
    for model in ways:
        is_large = model in LARGE
        steps = options.steps or (STEPS_OF_LARGE if is_large else STEPS)
        batch_size = BATCH_SIZE_OF_LARGE if is_large else BATCH_SIZE
        found[model] = compare(model, ways[model], options.repeats, steps, batch_size)
        findings += sentences(model, found[model])
    if device.type == "cpu":
        has = "has" if machine.has_bf16_instructions() else "has no"
        findings.append(f"This CPU {has} bf16 instructions.")
    return Comparison("precision", tables_of(found, device), findings, found)


def ways_of(model: str, options) -> dict[str, tuple[str, bool]]:
    """Those of the `WAYS` that this network is to be trained in."""
    is_compiled = not options.no_compiled and (model not in LARGE or options.compile_large)
    return {name: way for name, way in WAYS.items() if is_compiled or not way[1]}


def check_compiler(device: torch.device) -> None:
    """Raise `UserError` where torch.compile would not find what it needs to compile for a CPU."""
    names = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    if device.type == "cpu" and not any(map(shutil.which, names)):
        raise UserError(
            "torch.compile needs a C++ compiler for a CPU, and none is found: install g++ or "
            "clang++, or add --no-compiled"
        )


def compare(model: str, ways: dict, repeats: int, steps: int, batch_size: int) -> dict:
    """For each way {"images_per_second" and "seconds_per_step" of each turn, "losses" of all
    steps, "first_seconds" of the first, "logits_off" from fp32's, "megabytes"}.

    "logits_off" is the length of the difference over the length of fp32's logits, in the first
    forward, where the weights are still the same.
    """
    found: dict[str, dict[str, Any]]
    found = {name: {"seconds_per_step": [], "losses": []} for name in ways}
    bar = tqdm(total=len(ways) * (repeats + 1), desc=model, unit="turn")
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        processes, logits = {}, {}
        for number, (name, (precision, is_compiled)) in enumerate(ways.items()):
            process = processes[name] = stack.enter_context(worker())
            folder = str(Path(cache, str(number)))  # Inductor cannot compile below one with a blank
            setting = (model, precision, is_compiled, batch_size, torch.get_num_threads(), folder)
            first = process.submit(precision_training.begin, *setting).result()
            found[name]["first_seconds"], logits[name] = first["seconds"], first["logits"]
            bar.update()
        for repeat in range(repeats):
            order = list(ways)
            shift = repeat % len(order)  # nobody is always first
            for name in order[shift:] + order[:shift]:
                seconds, losses = processes[name].submit(precision_training.turn, steps).result()
                found[name]["seconds_per_step"].append(seconds)
                found[name]["losses"] += losses
                bar.update()
        for name, process in processes.items():
            found[name]["megabytes"] = (
                process.submit(precision_training.bytes_of_a_step).result() / 1e6
            )
    bar.close()
    for name, result in found.items():
        seconds = result["seconds_per_step"]
        result["images_per_second"] = [batch_size / one for one in seconds]
        result["last_loss"] = statistics.mean(result["losses"][-steps:])
        off = torch.tensor(logits[name]) - torch.tensor(logits["fp32"])
        result["logits_off"] = (off.norm() / torch.tensor(logits["fp32"]).norm()).item()
        result["batch_size"], result["steps"] = batch_size, 1 + repeats * steps
    return found


@contextmanager
def worker() -> Iterator[ProcessPoolExecutor]:
    """A process that stays alive. On an error here it is killed, with all that it has started.

    After Ctrl-C nobody waits for a compiler, which may take minutes. A terminal sends Ctrl-C to
    the worker too: it leaves it to this process.
    """
    options = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **options) as executor:
        process = psutil.Process(executor.submit(os.getpid).result())
        try:
            yield executor
        except BaseException:
            with suppress(psutil.NoSuchProcess):  # it may have died
                kill_tree(process)  # pyright: ignore[reportArgumentType] (it has pid and kill)
            raise


def tables_of(found: dict[str, dict], device: torch.device) -> list[Table]:
    """One table of speed for each network, and one of each other quantity for all of them."""
    tables = []
    for model, ways in found.items():
        rows = {name: result["images_per_second"] for name, result in ways.items()}
        title = f"{model}, {ways['fp32']['batch_size']} images per step, on {device}"
        tables.append(Table(title, "images/s", rows, "fp32"))
    for title, unit, key, digits in (
        ("Most that a step allocates: weights, optimizer state apart", "MB", "megabytes", 1),
        ("Loss in the last turn, after the same steps", "cross-entropy", "last_loss", 3),
        ("The first step, with compiling", "seconds", "first_seconds", 1),
    ):
        pairs = [(model, name) for model in found for name in found[model]]
        rows = {f"{model}, {name}": [found[model][name][key]] for model, name in pairs}
        tables.append(Table(title, unit, rows, digits=digits))
    return tables


def sentences(model: str, ways: dict[str, dict]) -> list[str]:
    """What bf16 does to the speed, what compiling costs and gains, how near the logits are."""
    lines = []
    for precision in ("fp32", "bf16"):
        if compiled := ways.get(f"{precision}, compiled"):
            lines.append(f"{model}, {precision}: {price(ways[precision], compiled)}")
    off = [f"{ways[name]['logits_off']:.0e} ({name})" for name in ways if name != "fp32"]
    lines.append(f"{model}: logits of the same weights are off from fp32's by {', '.join(off)}")
    return lines


def price(eager: dict, compiled: dict) -> str:
    """What compiling took, and after how many steps it has paid back, or that it does not."""
    took = compiled["first_seconds"] - statistics.median(compiled["seconds_per_step"])
    pairs = zip(eager["seconds_per_step"], compiled["seconds_per_step"], strict=True)
    saved = [before - after for before, after in pairs]
    low, high = median_interval(saved) or [min(saved), max(saved)]
    text = f"compiling took {took:.1f} s"
    if high <= 0:
        return f"{text}, and a step is slower then: it never pays back here"
    if low <= 0:
        return f"{text}, and a step is not surely faster then"
    median = statistics.median(saved)
    text += f", and saves {1000 * median:.1f} ms a step"
    return f"{text}: paid back after {took / median:,.0f} steps"


def draw(found: dict[str, dict], path: Path) -> None:
    """Bars for speed (its lowest and highest turn as a line), memory and first step; loss curves.

    `found` has what `precision.compare` gives, for each network.
    """
    from matplotlib.ticker import MaxNLocator

    figure = show.new_figure(10, 2.4 * len(found) + 0.3)
    grid = figure.subplots(len(found), 4, squeeze=False, width_ratios=[3, 3, 3, 4])
    for (model, ways), row in zip(found.items(), grid, strict=True):
        colours = dict(zip(ways, show.COLOURS, strict=False))
        for axis, key in zip(
            row, ("images_per_second", "megabytes", "first_seconds"), strict=False
        ):
            bars(axis, ways, colours, key)
            axis.set_yticks(range(len(ways)), list(ways) if axis is row[0] else [])
        for width, (name, result) in zip((7, 5, 2.5, 1), ways.items(), strict=False):
            style = "--" if "compiled" in name else "-"
            steps = range(2, 2 + len(result["losses"]))  # the first is told apart
            options = {"color": colours[name], "linewidth": width, "label": name}
            row[3].plot(steps, result["losses"], style, **options)  # they may lie on each other
        row[3].margins(y=0.3)
        row[3].set_ylim(bottom=0)
        row[3].xaxis.set_major_locator(MaxNLocator(5, integer=True))
        row[3].set_xlabel("step", fontsize=8)
        row[3].legend(fontsize=8, frameon=False, loc="lower left")
        row[0].set_ylabel(f"{model}\n{ways['fp32']['batch_size']} images per step", fontsize=9)
        for axis, title in zip(row, TITLES, strict=True):
            axis.set_title(title, loc="left", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
    show.save(figure, path)


def bars(axis, ways: dict[str, dict], colours: dict[str, str], key: str) -> None:
    """A bar for each way, to the median, with its number at the end."""
    for place, (name, result) in enumerate(ways.items()):
        values = result[key] if isinstance(result[key], list) else [result[key]]
        median = statistics.median(values)
        spread = [[median - min(values)], [max(values) - median]] if len(values) > 1 else None
        hatch = "///" if "compiled" in name else None
        axis.barh(place, median, xerr=spread, color=colours[name], capsize=2, hatch=hatch)
        number, end = f"{median:,.0f}" if median >= 10 else f"{median:.1f}", (max(values), place)
        options = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axis.annotate(number, end, (4, 0), **options)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.set_xlim(left=0)

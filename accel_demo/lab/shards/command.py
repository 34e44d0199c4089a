"""Show which samples each rank reads, with your script's loaders or with ours.

accel-demo shards -- torchrun --nproc-per-node 2 train.py
accel-demo shards --processes 3 --batch-size 5 --plot shards.png
accel-demo shards --method Accelerate --no-even-batches

With a script, or a command after --, it runs the script unchanged and without GPUs, ends it after a
few epochs, and prints what its loaders have returned. An epoch of a stream ends after 2000 batches,
and one of a dataset after 2000 to 3999. Files that it overwrites are put back. The exit code is 1
if something is wrong with a loader that is used for training.

Otherwise, it reads with loaders of its own. All numbers come from the batches that they actually
return. By default, `DistributedSampler` repeats samples until the dataset divides evenly among the
ranks, and Accelerate repeats samples until the batches divide evenly. As a result, all ranks have
the same number of batches, but some samples are read twice, and a metric must not count those
samples twice.
"""

from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.guess import comparison
from accel_demo.lab import load
from accel_demo.lab.observed.observation import (
    YOURS,
    add_options,
    is_about_a_script,
    observe,
    read_command,
    refuse_options,
    say_if_killed,
)
from accel_demo.lab.observed.places import NotChecked, last_lines
from accel_demo.lab.output import MeasuredFinding, write_outputs
from accel_demo.lab.shards import tables
from accel_demo.lab.shards.own import OwnShardsResult, loaders_of
from accel_demo.lab.shards.result import (
    ACCELERATE,
    TORCH,
    LoaderSettings,
    ShardsResult,
    explain_uneven_batches,
)
from accel_demo.observer.limits import BATCHES, EPOCHS
from accel_demo.options import Parser, command_parser
from accel_demo.show import save
from accel_demo.slow_imports import without_garbage_collection
from accel_demo.terminal import display, fill

QUICK_EPOCHS = 2
# After so many batches, a pass over a stream ends; one over a dataset, if it has twice as many.
MOST_BATCHES = 2000
MOST_SAMPLES, MOST_EPOCHS = 10_000, 100  # more would take minutes, because each batch is gathered
SWITCHES = {
    "--no-set-epoch": "do not call set_epoch before each epoch",
    "--split-batches": "Accelerate splits each batch of the DataLoader among the processes",
    "--dispatch-batches": "Accelerate reads only on rank 0 and sends each rank its part",
    "--no-even-batches": "Accelerate does not pad (even_batches=False)",
    "--drop-last": "drop the last samples instead of padding",
    "--no-shuffle": "read samples in dataset order",
}
OURS = "our loaders"


def main(arguments: list[str]) -> int:
    if is_about_a_script(arguments):
        return main_of_script(arguments)
    options = read_options(arguments)
    with without_garbage_collection():
        from accel_demo.lab.shards.reading import read_all
        from accel_demo.processes.group import results_by_rank

    preloaded = ("torch", read_all.__module__)  # without torch._dynamo, which only optimizers need
    settings = settings_of(options)
    result, *_ = results_by_rank(read_all, options.processes, settings, preloaded=preloaded)
    display(f"{tables.headline(result)}\n")
    display(tables.reading_table(result.loaders))
    if any(loader.gather for loader in result.loaders):
        display("\nSamples that a metric counts in an epoch:\n")
        display(tables.metric_table(result.loaders))
    for loader in result.loaders:
        if loader.gather is None:
            reason = explain_uneven_batches(loader.epochs[0].batches)
            text = f"{loader.name}: {reason}"
            display(f"\n{fill(text, 100, break_on_hyphens=False)}")
    if options.guess is not None:
        duplicates = len(result.loaders[-1].epochs[0].more_than_once)
        display(f"\n{comparison(options.guess, duplicates, ' samples')}")
    write_outputs(options, "shards", result, draw)
    return 0


def main_of_script(arguments: list[str]) -> int:
    """Show what the loaders of the reader's script return."""
    parser = make_parser()
    options = read_command(parser, arguments, "shards")
    refuse_options(parser, arguments[: -len(options.command)], OURS)
    if options.quick:
        options.epochs = min(options.epochs, QUICK_EPOCHS)
    limits = {EPOCHS: str(options.epochs), BATCHES: str(MOST_BATCHES)}
    evidence = observe(options, "shards", limits).evidence
    try:
        loaders = loaders_of(evidence)
    except NotChecked as reason:
        raise UserError(str(reason)) from None
    say_if_killed(evidence)
    if not loaders:
        last = "".join(last_lines(evidence.log)[-1:])
        raise UserError(
            f"the script has read no samples from a DataLoader, and has ended with exit code "
            f"{evidence.exit_code}: {last}"
        )
    world = max(rank.connected_world for rank in evidence.ranks)
    findings = [
        MeasuredFinding("samples", None, f"{loader.name}: {text}")
        for loader in loaders
        for text in loader.findings
    ]
    result = OwnShardsResult(world, options.command, evidence.exit_code, loaders, findings)
    display(tables.headline_of_script(result, len(evidence.ranks)))
    for loader in loaders:
        display(
            f"\n{tables.describe(loader)}\n\n{tables.reading_table([loader], with_names=False)}"
        )
        for finding in loader.findings:
            display(f"\n**{fill(finding, 96, break_on_hyphens=False)}**")
    if options.guess is not None:
        training = [loader for loader in loaders if loader.trains] or loaders
        duplicates = len(training[-1].epochs[0].more_than_once)
        display(f"\n{comparison(options.guess, duplicates, ' samples')}")
    write_outputs(options, "shards", result, draw, of_script=True)
    return int(bool(findings))


def draw(result: ShardsResult | OwnShardsResult, path: Path) -> None:
    """Draw the picture. It imports matplotlib, which takes a second, only if it is needed."""
    from accel_demo.lab.shards import picture

    warning = load.warning() if isinstance(result, OwnShardsResult) else ""
    save(picture.draw(result.loaders), path, warning)


def read_options(arguments: list[str]):
    """Parse and check the options. Raises `UserError` if they are invalid or cannot be combined."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    refuse_options(parser, arguments, YOURS)
    check(options)
    return options


def make_parser() -> Parser:
    parser = command_parser("shards", __doc__, quick=f"at most {QUICK_EPOCHS} epochs")
    parser.add_processes(2, "number of processes")
    parser.add_option("--epochs", 3, "number of epochs to read", least=1, most=MOST_EPOCHS)
    parser.add_guess("how many samples the last (training) loader reads twice in epoch 1")
    parser.begin_group(OURS)
    parser.add_option("--samples", 22, "size of the dataset", least=1, most=MOST_SAMPLES)
    help = "batch size per process, or global batch size with --split-batches"
    parser.add_option("--batch-size", 4, help, least=1, most=MOST_SAMPLES)
    choices = [TORCH, ACCELERATE, "both"]
    parser.add_option("--method", "both", "which loader to read with", choices=choices)
    for flag, help in SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=help)
    parser.begin_group(YOURS)
    add_options(parser)
    return parser


def settings_of(options) -> list[LoaderSettings]:
    """Return the settings of the chosen loaders. Both loaders have the same global batch size."""
    epochs = min(options.epochs, QUICK_EPOCHS) if options.quick else options.epochs
    common = (epochs, not options.no_set_epoch, not options.no_shuffle, options.drop_last)
    accelerate_only = (options.split_batches, options.dispatch_batches, not options.no_even_batches)
    samples, batch_size = options.samples, options.batch_size
    parts = options.processes if options.split_batches else 1
    by_torch = LoaderSettings(TORCH, samples, batch_size // parts, *common)
    by_accelerate = LoaderSettings(ACCELERATE, samples, batch_size, *common, *accelerate_only)
    return [s for s in (by_torch, by_accelerate) if options.method in (s.method, "both")]


def check(options) -> None:
    """Raise `UserError` if options cannot be combined."""
    if options.method == TORCH:
        for name in ("split_batches", "dispatch_batches", "no_even_batches"):
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is an option of Accelerate: {TORCH} does not have it")
    if options.dispatch_batches and options.no_even_batches:
        raise UserError(
            "--dispatch-batches always makes even batches: Accelerate ignores even_batches=False "
            "there. Remove one of the two flags."
        )
    if options.split_batches and options.batch_size % options.processes:
        raise UserError(
            f"--split-batches splits a batch among {options.processes} processes: --batch-size "
            f"must be a multiple of {options.processes}, got {options.batch_size}"
        )
    global_batch = options.batch_size * (1 if options.split_batches else options.processes)
    if options.drop_last and options.samples < global_batch:
        raise UserError(
            f"--drop-last would drop everything: one batch per process needs {global_batch} "
            f"samples, but --samples is {options.samples}"
        )

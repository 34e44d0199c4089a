"""Show where each process spends its time in a training step, in your script or in our loop.

accel-demo timeline -- torchrun --nproc-per-node 2 train.py
accel-demo timeline --straggler 1:20ms

With a script, or a command after --, it runs the script unchanged and without GPUs, and ends it
after a few dozen optimizer steps. Files that it overwrites are put back. Otherwise, it runs our
train.py. Either way, torch.profiler records some steps on each rank.

It prints how many milliseconds each phase takes, what makes the steps slow, and how much of the
all-reduce is hidden, which means that it runs at the same time as backward. It writes trace.json
for https://ui.perfetto.dev, and timeline.html, a page with a timeline that you can zoom and pan. If
your script profiles itself and writes a trace on each rank, these are merged into own-trace.json.
"""

import json
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from accel_demo.config import IMAGE_MODELS, TrainConfig
from accel_demo.errors import UserError
from accel_demo.guess import comparison
from accel_demo.lab import hosts, load
from accel_demo.lab.observed.observation import (
    YOURS,
    add_options,
    is_about_a_script,
    read_command,
    refuse_options,
)
from accel_demo.lab.output import warn, write_json
from accel_demo.lab.timeline import merge
from accel_demo.lab.timeline.own import measure_script
from accel_demo.lab.timeline.page import write_timeline_page
from accel_demo.lab.timeline.picture import figure_of
from accel_demo.lab.timeline.result import TimelineResult
from accel_demo.lab.timeline.tables import as_text
from accel_demo.options import Parser, command_parser
from accel_demo.show import save
from accel_demo.slow_imports import without_garbage_collection
from accel_demo.terminal import display

REPEATS = 9  # profiled runs of each bucket size, if there are several sizes
MOST_STEPS = 100  # a limit, because each profiled step has thousands of events


OURS = "our training loop"


def main(arguments: list[str]) -> int:
    if is_about_a_script(arguments):
        return main_of_script(arguments)
    options = read(arguments)
    with without_garbage_collection():
        from accel_demo.lab.timeline.measurement import measure

    result, traces = measure(options)
    show(result, {"trace": traces}, options)
    return 0


def main_of_script(arguments: list[str]) -> int:
    """Show the steps of the reader's script."""
    parser = make_parser()
    options = read_command(parser, arguments, "timeline")
    refuse_options(parser, arguments[: -len(options.command)], OURS)
    options.files = files_to_write(options)
    result, traces, own_traces = measure_script(options)
    if own_traces:
        options.files["own_trace"] = options.output / "own-trace.json"
    show(result, {"trace": traces, "own_trace": own_traces}, options)
    return 0


def show(result: TimelineResult, traces: dict[str, list[dict]], options) -> None:
    """Print the result, and write the files."""
    display(as_text(result))
    warn("timeline")
    if options.guess is not None:
        hidden = 100 * fmean(rank.hidden_share for rank in result.ranks)
        display(f"\n{comparison(options.guess, hidden, '%')}")
    paths = write(result, traces, options)
    display(f"\nwrote {', '.join(map(str, paths))}")
    display("open trace.json in https://ui.perfetto.dev or chrome://tracing")


def make_parser() -> Parser:
    parser = command_parser("timeline", __doc__, quick="a smaller model and fewer steps")
    add = parser.add_argument
    parser.add_processes(2, "connected processes")
    parser.add_option("--steps", 8, "steps to show", quick=4, least=2, most=MOST_STEPS)
    help = "folder for trace.json and timeline.html (default: runs/timeline)"
    add("--output", type=Path, default=Path("runs/timeline"), metavar="FOLDER", help=help)
    add("--html", type=Path, metavar="FILE", help="write the page to FILE instead of FOLDER")
    parser.add_guess("how much of the all-reduce is hidden, in %% (mean over the ranks)")
    parser.begin_group(OURS)
    parser.add_option("--model", "vgg11", "the model", quick="small_cnn", choices=IMAGE_MODELS)
    parser.add_option("--batch-size", 8, "images per process and micro-batch")
    parser.add_option("--accumulate", 1, "micro-batches per optimizer step")
    help = "DDP's bucket size in MiB, or several sizes to compare (default: 25, as in DDP)"
    add("--bucket-mb", default="25", metavar="MB", help=help)
    help = "runs per bucket size, if there are several"
    parser.add_option("--repeats", REPEATS, help, quick=1, least=1, most=100)
    help = "delay a rank in each step (e.g. 1:20ms); not detected below 5 ms or 2 %% of a step"
    add("--straggler", metavar="RANK:MILLISECONDSms", help=help)
    hosts.add_rate(parser)
    parser.begin_group(YOURS)
    add_options(parser)
    return parser


def read(arguments: list[str]):
    """Parse and check the options. Add the `config` for train.py and the `files` to write."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    refuse_options(parser, arguments, YOURS)
    options.bucket_mb = bucket_sizes(options.bucket_mb)
    options.straggler = straggler_in(options.straggler, options.processes)
    options.config = TrainConfig(
        model=options.model, batch_size=options.batch_size, accumulate=options.accumulate
    )
    hosts.check_rate(options.rate, options.processes, options.config)
    options.files = files_to_write(options)
    return options


def bucket_sizes(text: str) -> list[float]:
    """Parse a list of bucket sizes in MiB, such as "0.05,0.5,25"."""
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--bucket-mb must be like 25 or 0.05,0.5,25, got {text}") from None
    if not all(0.001 <= size <= 10_000 for size in sizes):
        raise UserError(f"--bucket-mb must be from 0.001 to 10000, got {text}")
    return list(dict.fromkeys(sizes))


def straggler_in(text: str | None, processes: int) -> tuple[int, float] | None:
    """Parse a rank and its delay in milliseconds: "1:20ms" becomes (1, 20.0)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)ms", text)
    if not match:
        raise UserError(f"--straggler takes RANK:MILLISECONDSms, such as 1:20ms; got {text}")
    rank, milliseconds = int(match[1]), float(match[2])
    if processes < 2:
        raise UserError("--straggler needs other ranks to compare with. Use --processes 2.")
    if rank >= processes:
        raise UserError(f"--straggler: {processes} processes have no rank {rank}")
    if not 0 < milliseconds <= 10_000:
        raise UserError(f"--straggler must be above 0 and at most 10000ms, got {match[2]}ms")
    return rank, milliseconds


def files_to_write(options) -> dict[str, Path]:
    """Return the path of each output file. Raises `UserError` if a file cannot be written."""
    folder = options.output
    check_folder(folder)
    files = {"trace": folder / "trace.json", "page": options.html or folder / "timeline.html"}
    files |= {name: getattr(options, name) for name in ("json", "plot") if getattr(options, name)}
    resolved = []
    for path in files.values():
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        # /dev/null is not a regular file, so several outputs may be written to it.
        if path.resolve() in resolved and (path.is_file() or not path.exists()):
            raise UserError(f"{path} cannot contain two outputs. Choose two names.")
        resolved.append(path.resolve())
    return files


def check_folder(folder: Path) -> None:
    """Raise `UserError` if no file can be written into a folder, or if it cannot be created."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write into --output {folder}: {error.strerror}") from None
    finally:
        for path in missing:  # the command creates them again if it can measure
            with suppress(OSError):
                path.rmdir()


def write(result: TimelineResult, traces: dict[str, list[dict]], options) -> list[Path]:
    """Write all files to a temporary folder, and if there is no error, copy them to their paths."""
    with tempfile.TemporaryDirectory() as folder:
        # Keep the suffixes, because matplotlib derives the image format from the suffix.
        drafts = {
            output: Path(folder, output + path.suffix) for output, path in options.files.items()
        }
        for name, of_ranks in traces.items():
            if of_ranks:
                trace = json.dumps(merge.merged(of_ranks), separators=(",", ":"))  # compact JSON
                drafts[name].write_text(trace, encoding="utf-8")
        write_timeline_page(result, drafts["page"])
        if "json" in drafts:
            write_json(drafts["json"], "timeline", result, hasattr(options, "command"))
        if "plot" in drafts:
            save(figure_of(result), drafts["plot"], load.warning())
        options.output.mkdir(parents=True, exist_ok=True)
        for output, path in options.files.items():
            shutil.copyfile(drafts[output], path)
    return list(options.files.values())

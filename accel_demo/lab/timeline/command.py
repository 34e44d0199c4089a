"""Show where the time of a training step goes, on every process, and what the all-reduce costs.

accel-demo timeline
accel-demo timeline --bucket-mb 0.05,0.5,25
accel-demo timeline --straggler 1:20ms

Some steps of a real run of train.py are profiled on every rank, and laid on one clock. It prints
the milliseconds of each phase, and how much of the all-reduce is hidden under backward; it writes
trace.json for https://ui.perfetto.dev and timeline.html, a page to zoom and to pan.
"""

import json
import math
import os
import re
import shutil
import tempfile
from pathlib import Path

from accel_demo.config import MODELS, TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab import flags
from accel_demo.lab.timeline import merge, recording
from accel_demo.lab.timeline.phases import PHASES, found_of
from accel_demo.lab.timeline.picture import verdict
from accel_demo.lab.timeline.straggler import STEPS_NEEDED
from accel_demo.processes import group
from accel_demo.show import table
from accel_demo.wording import counted

FILES = ("trace.json", "timeline.html")
MOST_STEPS = 100  # a profiled step has thousands of events


def main(arguments: list[str]) -> int:
    options = read(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found, traces = measure(options, folder)
        print(described(found))
        files = Path(folder, "files")
        files.mkdir()
        written = write(found, traces, files, options)
    print(f"\nwritten: {', '.join(map(str, written))}")
    print("trace.json opens in https://ui.perfetto.dev and in chrome://tracing")
    return 0


def read(arguments: list[str]):
    """The options, their mistakes found. `runs` is what `recording.profile_runs` takes."""
    parser = flags.parser_of("timeline", __doc__, quick="a smaller network, fewer steps")
    add = parser.add_argument
    flags.add_processes(parser, 2, "connected processes")
    add("--steps", type=int, metavar="N", help="steps to show (default: 8; with --quick 4)")
    help = "the network (default: vgg11; with --quick small_cnn)"
    add("--model", choices=MODELS, help=help)
    help = "images per process and micro-batch (default: 8)"
    add("--batch-size", type=int, metavar="N", help=help)
    help = "micro-batches per optimizer step (default: 1)"
    add("--accumulate", type=int, default=1, metavar="N", help=help)
    help = "size of DDP's buckets in MiB; several, as in 0.05,0.5,25, are tried in turn"
    add("--bucket-mb", default="25", metavar="MB", help=f"{help} (default: 25, DDP's own)")
    help = "hold this rank up in each step, as in 1:20ms, to see it named: from 5 ms on, and from "
    help += "2 %% of a step on"
    add("--straggler", metavar="RANK:MILLISECONDSms", help=help)
    help = "where trace.json and timeline.html go (default: runs/timeline)"
    add("--output", type=Path, default=Path("runs/timeline"), metavar="FOLDER", help=help)
    help = "write the page here instead (default: timeline.html in that folder)"
    add("--html", type=Path, metavar="FILE", help=help)
    options = flags.read(parser, arguments)
    if options.steps is None:
        options.steps = 4 if options.quick else 8
    if options.model is None:
        options.model = "small_cnn" if options.quick else "vgg11"
    if options.batch_size is None:
        options.batch_size = 8
    if not 2 <= options.steps <= MOST_STEPS:
        raise UserError(f"--steps must be from 2 to {MOST_STEPS}, got {options.steps}")
    options.bucket_mb = bucket_sizes(options.bucket_mb)
    options.straggler = straggler_in(options.straggler, options.processes)
    check_images(options)
    check_folder(options.output)
    check_files(options)
    choices = {"model": options.model, "batch_size": options.batch_size}
    choices["accumulate"] = options.accumulate
    run = {"choices": choices, "steps": options.steps, "straggler": options.straggler}
    options.runs = [{**run, "bucket_mb": size} for size in options.bucket_mb]
    options.runs[-1]["steps"] = max(options.steps, STEPS_NEEDED)  # it tells who is slow
    return options


def bucket_sizes(text: str) -> list[float]:
    """ "0.05,0.5,25" as numbers, each above 0."""
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--bucket-mb takes 25, or 0.05,0.5,25; got {text}") from None
    if not all(0.001 <= size <= 10_000 for size in sizes):
        raise UserError(f"--bucket-mb must be from 0.001 to 10000, got {text}")
    return sizes


def straggler_in(text: str | None, processes: int) -> tuple[int, float] | None:
    """ "1:20ms" as (1, 20.0)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)ms", text)
    if not match:
        raise UserError(f"--straggler takes RANK:MILLISECONDSms, such as 1:20ms; got {text}")
    rank, milliseconds = int(match[1]), float(match[2])
    if processes < 2:
        raise UserError("--straggler needs other ranks to be slower than: use --processes 2")
    if rank >= processes:
        raise UserError(f"--straggler: {processes} processes have no rank {rank}")
    if not 0 < milliseconds <= 10_000:
        raise UserError(f"--straggler must be above 0 and at most 10000ms, got {match[2]}ms")
    return rank, milliseconds


def check_images(options) -> None:
    """Raise `UserError` where one epoch has too few images for the steps."""
    config = TrainConfig(
        model=options.model, batch_size=options.batch_size, accumulate=options.accumulate
    )
    train_set, _ = load_datasets(config, options.processes)
    steps = max(options.steps, STEPS_NEEDED) + recording.STEPS_AROUND
    needed = steps * options.batch_size * options.accumulate * options.processes
    if needed > len(train_set):
        raise UserError(
            f"{steps} steps of {needed // steps} images (some come before the profiled ones) take "
            f"{needed}, but there are {len(train_set)}: choose a smaller --batch-size"
        )


def check_folder(folder: Path) -> None:
    """Raise `UserError` where nobody can write into the folder. Leaves everything as it was."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for path in made:
            path.rmdir()
    except OSError as error:
        raise UserError(f"cannot write into --output {folder}: {error.strerror}") from None


def check_files(options) -> None:
    """Raise `UserError` where two files would be one, or a folder is where one is to be."""
    asked = [options.output / "trace.json", options.html or options.output / "timeline.html"]
    asked += [path for path in (options.json, options.plot) if path]
    for number, path in enumerate(asked):
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        if path.is_file() or not path.exists():  # /dev/null takes all
            if path.resolve() in [other.resolve() for other in asked[:number]]:
                raise UserError(f"{path} cannot hold two outputs: choose another name for one")


def measure(options, folder: str) -> tuple[dict, list[dict]]:
    """What was found, and the traces on one clock. Of several bucket sizes, the last is shown."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes to stderr
    by_rank = group.results_by_rank(recording.profile_runs, options.processes, options.runs, folder)
    sweep = []
    for number, run in enumerate(options.runs):
        of_run = [of_rank[number] for of_rank in by_rank]
        traces = merge.load(of_run)
        found = found_of(of_run, traces, options.steps)
        buckets = of_run[0]["bucket_bytes"]
        sweep.append({"bucket_mb": run["bucket_mb"], "buckets": len(buckets), **row_of(found)})
    about = {name: of_run[0][name] for name in ("processes", "backend", "device")}
    about |= {"model": options.model, "batch_size": options.batch_size}
    about |= {"accumulate": options.accumulate, "bucket_mb": run["bucket_mb"]}
    about |= {"bucket_bytes": buckets, "phases": PHASES}
    return {**about, **found, "sweep": sweep if len(sweep) > 1 else []}, traces


def row_of(found: dict) -> dict:
    """A run in a line of the sweep: the mean over ranks of their medians."""
    ranks = found["summary"]
    return {
        "all_reduce_ms": math.fsum(rank["all_reduce_ms"] for rank in ranks) / len(ranks),
        "exposed_ms": math.fsum(rank["exposed_ms"] for rank in ranks) / len(ranks),
        "hidden_share": math.fsum(rank["hidden_share"] for rank in ranks) / len(ranks),
        "step_ms": math.fsum(rank["wall_ms"] for rank in ranks) / len(ranks),
    }


def described(found: dict) -> str:
    """The tables, to be read in a terminal. Milliseconds are medians over the steps."""
    lines = [
        f"{counted(found['processes'], 'connected process')} on "
        f"{found['device']} ({found['backend']}): "
        f"{found['model']}, batches of {found['batch_size']} images per process",
    ]
    if found["bucket_bytes"]:
        sizes = ", ".join(f"{size / 2**20:.2f}" for size in found["bucket_bytes"])
        lines.append(f"buckets of {found['bucket_mb']:g} MiB are in fact of {sizes} MiB")
    head = ["rank", *PHASES, "step", "late"]
    rows = []
    for rank in found["summary"]:
        times = [*rank["phases_ms"].values(), rank["wall_ms"], rank["late_ms"]]
        rows.append([rank["rank"], *(round(time, 1) for time in times)])
    lines += ["", "milliseconds of a step (medians):", "", table(head, rows), ""]
    if any("broadcast" in bar["name"] for rank in found["ranks"] for bar in rank["bars"]):
        lines.append("all-reduce also has the wait for the buffers of BatchNorm, from rank 0")
    for rank in found["summary"] if found["bucket_bytes"] else []:
        lines.append(
            f"rank {rank['rank']}: all-reduce under way {rank['all_reduce_ms']:.1f} ms, "
            f"{rank['hidden_share']:.0%} of it hidden under backward"
        )
    lines.append(verdict(found))
    if found["sweep"]:
        head = ["bucket MiB", "buckets", "all-reduce ms", "exposed ms", "hidden %", "step ms"]
        rows = [
            [
                f"{row['bucket_mb']:g}",
                row["buckets"],
                round(row["all_reduce_ms"], 1),
                round(row["exposed_ms"], 1),
                round(100 * row["hidden_share"]),
                round(row["step_ms"], 1),
            ]
            for row in found["sweep"]
        ]
        lines += ["", table(head, rows)]
    return "\n".join(lines)


def write(found: dict, traces: list[dict], folder: Path, options) -> list[Path]:
    """Write every file into a folder of its own; only when all are there, put them in place."""
    from accel_demo.lab.timeline import page as timeline_page
    from accel_demo.lab.timeline import picture as timeline_picture

    places = {folder / name: options.output / name for name in FILES}
    if options.html:
        places[folder / "timeline.html"] = options.html
    trace = json.dumps(merge.merged(traces), separators=(",", ":"))  # it is large
    (folder / "trace.json").write_text(trace)
    timeline_page.write(found, folder / "timeline.html")
    if options.plot:
        timeline_picture.draw(found, folder / f"plot{options.plot.suffix}")
        places[folder / f"plot{options.plot.suffix}"] = options.plot
    if options.json:
        flags.write_json(folder / "numbers.json", found)
        places[folder / "numbers.json"] = options.json
    options.output.mkdir(parents=True, exist_ok=True)
    copies = [(place.with_name(f".{place.name}.unfinished"), place) for place in places.values()]
    try:
        for new, (copy, place) in zip(places, copies, strict=True):
            is_device = place.exists() and not place.is_file()  # /dev/stdout
            shutil.copyfile(new, place if is_device else copy)
        for copy, place in copies:
            if copy.exists():
                copy.replace(place)
    finally:
        for copy, _ in copies:
            copy.unlink(missing_ok=True)
    return list(places.values())

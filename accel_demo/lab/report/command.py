"""Make one page of one or more runs, from their folders alone: it needs no torch and no data.

accel-demo report runs/train
accel-demo report runs/train runs/train_ddp-2-processes --html both.html

The page is one file that needs no network: final figures, curves, confusion matrices, the surest
mistakes with their images, and where the runs' choices differ. The same is printed as text. What is
missing or damaged in a folder is named, and the rest is shown.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.lab.report.files import printable
from accel_demo.lab.report.page import write_report
from accel_demo.lab.report.runs import FILES, check_folders, read_runs
from accel_demo.lab.report.text import as_text

# To be read in this order. What a folder holds: files (any one file), metrics and predictions (the
# two with a form of their own), runs (the whole folder). What several runs have in common and where
# they differ: compare. As text: text. As a page: curves, images, and page around both.


def main(arguments: list[str]) -> int:
    """Print the report, and write the page. Raises `UserError` before anything is written."""
    parser = Parser(__doc__, prog="accel-demo report")
    help = "the folder of a run, such as runs/train"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=help)
    help = "write the page here (default: report.html in the first run's folder)"
    parser.add_argument("--html", type=Path, metavar="FILE", help=help)
    help = "write what was found in each run here"
    parser.add_argument("--json", type=Path, metavar="FILE", help=help)
    help = "print the text alone, and write no page"
    parser.add_argument("--quick", action="store_true", help=help)
    options = parser.parse_args(arguments)
    check_folders(options.runs)
    page = None if options.quick else options.html or options.runs[0] / "report.html"
    _check_files(options, page)

    runs = read_runs(options.runs)
    if options.json:
        text = json.dumps({"runs": [_without_images(run) for run in runs]}, indent=2) + "\n"
        _write_whole(options.json, lambda file: file.write_text(text))
    if page:
        _write_whole(page, lambda file: write_report(file, runs))
    _print(as_text(runs) + (f"\n\nreport: {printable(str(page), 1000)}" if page else ""))
    return 0


def _check_files(options, page: Path | None) -> None:
    """Raise `UserError` where a file asked for cannot be, or would replace one that is read."""
    if options.quick and options.html:
        raise UserError("--quick writes no page: leave out --html, or --quick")
    taken = {os.path.realpath(folder / file) for folder in options.runs for file in FILES}
    for flag, path in (("--json", options.json), ("--html", page)):
        if path is None:
            continue
        if os.path.realpath(path) in taken:
            raise UserError(f"{flag} would replace {printable(str(path))}: name another file")
        taken.add(os.path.realpath(path))
        if not _is_writable(path):
            raise UserError(f"cannot write {flag} {printable(str(path))}: name another file")


def _is_writable(path: Path) -> bool:
    """Whether an ordinary file of this name can be written, beside a temporary one."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return not path.exists() or (path.is_file() and os.access(path, os.W_OK))
    except OSError:
        return False


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write the file: whole or not at all. Raises `UserError`.

    A link of that name is replaced and not followed: a run folder of somebody else may hold one to
    a file of yours.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".report.", dir=path.parent) as folder:
            whole = Path(folder, "whole")
            write(whole)
            os.replace(whole, path)
    except OSError as error:
        raise UserError(f"cannot write {printable(str(path))} ({error.strerror})") from None


def _without_images(run: dict) -> dict:
    """What was read of a run, without the images, which the folder has."""
    predictions = run["predictions"]
    if predictions is None:
        return run
    mistakes = [{k: v for k, v in one.items() if k != "png"} for one in predictions["mistakes"]]
    return {**run, "predictions": {**predictions, "mistakes": mistakes}}


def _print(text: str) -> None:
    """Print on a terminal of any encoding: what it does not have becomes a question mark.

    A reader who has seen enough, as `| head` has, ends it quietly.
    Source: https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""Show the curves, final results and mistakes of one or more runs, side by side.

accel-demo report                # list the runs in runs/
accel-demo report runs/train
accel-demo report runs/train runs/train_ddp-2-processes --html both.html

The command writes an HTML page, a single file that works offline. It shows the final results,
curves, confusion matrices and most confident mistakes of each run, and how the configs and
environments differ. The command also prints the report, without the misclassified images. If a run
has missing or damaged files, the report lists them and shows everything else. If there are several
paths, as in `accel-demo report runs/*`, those that are not runs are skipped.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab.output import print_text, write_json
from accel_demo.lab.report.page import write_report
from accel_demo.lab.report.runs import FILES, SavedRun, read_runs, runs_among
from accel_demo.lab.report.tables import as_text
from accel_demo.lab.run_list import print_runs
from accel_demo.options import Parser, check_outputs


@dataclass(frozen=True)
class RunsReport:
    """The contents of the file that `--json` writes."""

    runs: list[SavedRun]


def without_images(run: SavedRun) -> SavedRun:
    """Return a copy of the run for the JSON file, without the misclassified images."""
    if run.predictions is None:
        return run
    mistakes = [replace(mistake, png="") for mistake in run.predictions.mistakes]
    return replace(run, predictions=replace(run.predictions, mistakes=mistakes))


def main(arguments: list[str]) -> int:
    """Print the report and write the page. Invalid options raise `UserError` before any output."""
    options = make_parser().parse_args(arguments)
    if not options.runs:
        print_runs("report", arguments)
        return 0
    given, options.runs = len(options.runs), runs_among(options.runs)
    if options.quick and options.html:
        raise UserError("--quick writes no page. Remove either --quick or --html.")
    if not options.quick:
        options.html = options.html or options.runs[0] / "report.html"
    _check_nothing_is_replaced(options)
    check_outputs(options)

    runs = read_runs(options.runs)
    if options.json:
        write_json(options.json, "report", RunsReport([without_images(run) for run in runs]))
    text, skipped = as_text(runs), given - len(runs)
    if skipped:
        are = "is not a run and was" if skipped == 1 else "are not runs and were"
        text = f"note: {skipped} of the {given} paths {are} skipped\n\n{text}"
    if options.html:
        write_report(options.html, runs)
        text += f"\n\nreport: {options.html}"
    print_text(text)
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo report")
    help = "the folder of a run, such as runs/train (without RUN: list the runs in runs/)"
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help=help)
    help = "write the page to FILE (default: report.html in the first run's folder)"
    parser.add_argument("--html", type=Path, metavar="FILE", help=help)
    parser.add_json()
    help = "print the report without writing a page"
    parser.add_argument("--quick", action="store_true", help=help)
    return parser


def _check_nothing_is_replaced(options) -> None:
    """Raise `UserError` if --json and --html name the same file, or one names a file of a run."""
    taken = {(folder / file).resolve() for folder in options.runs for file in FILES}
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path and path.resolve() in taken:
            raise UserError(f"{flag} would replace {path}. Choose a different file.")
        if path:
            taken.add(path.resolve())

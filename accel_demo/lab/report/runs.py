"""Run folders, read whole: what each holds, what is missing or damaged. Needs no torch."""

import os
from pathlib import Path

from tqdm import tqdm

from accel_demo.errors import UserError
from accel_demo.lab.report.files import Unreadable, is_number, kind_of, printable, read_entries
from accel_demo.lab.report.metrics import CURVES, read_metrics
from accel_demo.lab.report.predictions import read_predictions

FILES = ("config.json", "environment.json", "metrics.jsonl", "summary.json", "predictions.json")
WITHOUT = {  # what a reader misses where a file is missing
    "config.json": "its choices are unknown",
    "environment.json": "what it ran on is unknown",
    "metrics.jsonl": "it has no curves",
    "summary.json": "its final figures are unknown",
    "predictions.json": "it has no confusion matrix and no mistakes",
}


def check_folders(folders: list[Path]) -> None:
    """Raise `UserError` where one of them is no run, or is named twice."""
    seen = set()
    for folder in folders:
        name = printable(str(folder))
        try:
            if not folder.is_dir():
                what = "is no folder" if folder.exists() else "does not exist"
                raise UserError(f"{name} {what}: name the folder of a run")
            there = {path.name for path in folder.iterdir()}
            resolved = folder.resolve()
        except OSError as error:
            raise UserError(f"{name} cannot be read ({error.strerror})") from None
        if there.isdisjoint(FILES):
            raise UserError(f"{name} holds no run: none of {', '.join(FILES)} is in it")
        if resolved in seen:
            raise UserError(f"{name} is named twice: name each run once")
        seen.add(resolved)


def read_runs(folders: list[Path]) -> list[dict]:
    """What each of these run folders holds: see `read_run`."""
    names = _names(folders)
    with tqdm(total=len(folders), desc="reading", unit="run", leave=False) as bar:
        runs = []
        for name, folder in zip(names, folders, strict=True):
            runs.append(read_run(folder, name))
            bar.update()
    return runs


def read_run(folder: Path, name: str) -> dict:
    """What one run folder holds; None for each file that cannot be used.

    `config`, `environment` and `summary` are flat, `metrics` is as in `read_metrics`,
    `predictions` as in `read_predictions`. All texts are printable, and none is escaped for HTML.
    `problems` says what is missing, damaged or skipped: file, first and last line (or None), text.
    """
    run = {"name": name, "folder": printable(str(folder), 1000), "problems": []}
    readers = {
        "config": read_entries,
        "environment": read_entries,
        "metrics": read_metrics,
        "summary": read_entries,
        "predictions": read_predictions,
    }
    for file in FILES:
        key = file.partition(".")[0]
        run[key] = None
        try:
            run[key] = readers[key](folder / file)
        except Unreadable as reason:
            has_not_ended = file == "summary.json" and str(reason) == "is missing"
            meaning = "the run has not finished" if has_not_ended else WITHOUT[file]
            _problem(run, file, f"{reason}: {meaning}")
    if run["predictions"]:
        run["predictions"], remarks = run["predictions"]
        for says in remarks:
            _problem(run, "predictions.json", says)
    _check_summary(run)
    metrics = run["metrics"]
    if metrics is None:
        curves = {curve: [] for curve in CURVES}
        run["metrics"] = {"lines": 0, "drawn": 0, "curves": curves, "skipped": [], "remarks": []}
    elif metrics["lines"] == 0:
        _problem(run, "metrics.jsonl", f"is empty: {WITHOUT['metrics.jsonl']}")
    notes = [(note, f"skipped: it {note['says']}") for note in run["metrics"]["skipped"]]
    notes += [(note, note["says"]) for note in run["metrics"]["remarks"]]
    for note, says in sorted(notes, key=lambda one: one[0]["first"]):
        _problem(run, "metrics.jsonl", says, note)
    return run


def where(problem: dict) -> str:
    """The file of a problem, with its line or lines: "metrics.jsonl lines 3 to 7"."""
    if problem["first"] is None:
        return problem["file"]
    if problem["first"] == problem["last"]:
        return f"{problem['file']} line {problem['first']}"
    return f"{problem['file']} lines {problem['first']} to {problem['last']}"


def line_count(run: dict) -> str:
    """How many lines of metrics.jsonl are drawn, and how many are not."""
    lines, drawn = run["metrics"]["lines"], run["metrics"]["drawn"]
    return f"{drawn:,} of {lines:,} lines of metrics.jsonl drawn, {lines - drawn:,} skipped"


def _check_summary(run: dict) -> None:
    """Drop the figures of summary.json that are none."""
    summary = run["summary"] or {}
    shares = ("test_accuracy", "best_test_accuracy")
    for name in (*shares, "images_per_second", "train_seconds", "peak_gpu_memory_bytes"):
        if name in summary and not is_number(summary[name], 0, 1 if name in shares else 10**15):
            says = f"has the {name} {kind_of(summary.pop(name))}, which is left out"
            _problem(run, "summary.json", says)


def _problem(run: dict, file: str, says: str, note: dict | None = None) -> None:
    first, last = (note["first"], note["last"]) if note else (None, None)
    run["problems"].append({"file": file, "first": first, "last": last, "says": says})


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path; where two have the same, all but what the paths share."""
    paths = [os.path.abspath(folder) for folder in folders]
    names = [os.path.basename(path) or path for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, common) for path in paths]
    return [printable(name, 80) for name in names]

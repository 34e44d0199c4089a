"""Describe runs as text: their final results, differences, curves and confusion matrices."""

import json
from statistics import median
from typing import Any

from accel_demo.lab.report.runs import CURVES, Point, SavedRun
from accel_demo.show import table
from accel_demo.wording import byte_size

NO_VALUE, UNKNOWN, NOT_SET = "–", "unknown", "not set"
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 32  # characters
WIDEST_CELL = 40  # characters; longer texts are shortened, except on the page and in the JSON file
WORST = 5  # number of confusions to list, in the text and on the page
WORST_CHARACTERS = 10
CHARACTER_HEAD = ["character", "times", "mean loss", "part of the loss", "accuracy"]


def as_text(runs: list[SavedRun]) -> str:
    """Return the whole report as text, without the misclassified images."""
    figures = [[name, *map(_short, texts)] for name, texts in final_figures(runs).items()]
    parts = [table(["result", *(_short(run.name) for run in runs)], figures)]
    parts += _choices(runs) + _curves(runs)
    for run in runs:
        parts += _confusion(run) + _characters(run)
    parts += ["", "files read", ""]
    for run in runs:
        parts.append(f"  {run.name}: {run.lines_text()}")
        parts += [f"    {problem.file:16}  {problem.message}" for problem in run.problems]
    return "\n".join(parts)


def final_figures(runs: list[SavedRun]) -> dict[str, list[str]]:
    """Map the name of each final result to a list of strings, one per run.

    Results that no run has are omitted. If a run has no summary.json, its accuracies and
    images/s are taken from metrics.jsonl.
    """
    columns = [_figures(run) for run in runs]
    rows = {name: [column[name] or NO_VALUE for column in columns] for name in columns[0]}
    return {name: texts for name, texts in rows.items() if set(texts) != {NO_VALUE}}


def differences(
    entries: list[dict[str, Any] | None],
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the entries that differ between runs (a string per run) and those that are equal.

    `entries` contains the config or environment of each run (None if it could not be read).
    """
    known = [run_entries for run_entries in entries if run_entries is not None]
    differing, equal = {}, {}
    for name in dict.fromkeys(name for run_entries in known for name in run_entries):
        texts = {_entry(run_entries, name) for run_entries in known}
        if len(texts) == 1:
            equal[name] = texts.pop()
        else:
            differing[name] = [
                UNKNOWN if run_entries is None else _entry(run_entries, name)
                for run_entries in entries
            ]
    return differing, equal


def number(value: float, digits: int = 6) -> str:
    """Format a value with at most `digits` significant digits, such as 0.000123457 or 1,630.71."""
    return f"{value:,.{digits}g}"


def sparkline(points: list[Point], low: float, high: float, last_step: int) -> str:
    """Draw a curve from step 0 to `last_step` as a line of `SPARKLINE_WIDTH` block characters.

    The lowest block represents `low`, and the highest block represents `high`. Values between two
    points are interpolated. If several points fall on one character, the last point is shown.
    """
    line = [" "] * SPARKLINE_WIDTH
    places = [(round(step / (last_step or 1) * (len(line) - 1)), value) for step, value in points]
    for (start, before), (end, after) in zip(places[:1] + places, places, strict=False):
        for place in range(min(start, end), end + 1):
            share = (place - start) / (end - start) if end > start else 1
            value = before + (after - before) * share
            height = (value - low) / (high - low) if high > low else 0.5
            line[place] = SPARKS[round(height * (len(SPARKS) - 1))]
    return "".join(line)


def _figures(run: SavedRun) -> dict[str, str]:
    metrics, summary, environment = run.metrics, run.summary, run.environment or {}
    accuracies, step = metrics.values("test_accuracy"), metrics.last_step
    figures = {
        "state": "finished" if run.is_finished else "not finished",
        "test accuracy": _last(accuracies),
        "best test accuracy": _last(sorted(accuracies)),
        "test loss": _last(metrics.values("test_loss")),
        "train loss, last interval": _last(metrics.values("train_loss")),
        "images/s in training": _median(metrics.values("images_per_second")),
        "characters/s in training": _median(metrics.values("characters_per_second")),
        "seconds of training": "",
        "optimizer steps": f"{step:,}" if step else "",
        **_samples("image", None if run.is_text else run.images_per_step, step),
        **_samples("sequence", run.images_per_step if run.is_text else None, step),
        "processes": _entry(environment, "processes") if "processes" in environment else "",
        "device": _entry(environment, "device") if "device" in environment else "",
        "peak GPU memory": "",
    }
    if summary:
        figures |= {
            "test accuracy": f"{summary.test_accuracy:.4f}",
            "best test accuracy": f"{summary.best_test_accuracy:.4f}",
            "seconds of training": f"{summary.train_seconds:,.1f}",
        }
        for unit in ("images", "characters"):
            if speed := getattr(summary, f"{unit}_per_second"):
                figures[f"{unit}/s in training"] = f"{speed:,.0f}"
        if summary.peak_gpu_memory_bytes is not None:
            figures["peak GPU memory"] = byte_size(summary.peak_gpu_memory_bytes)
    return figures


def _median(speeds: list[float]) -> str:
    return f"{median(speeds):,.0f} (median of all log lines)" if speeds else ""


def _samples(sample: str, per_step: int | None, step: int) -> dict[str, str]:
    return {
        f"{sample}s per step": f"{per_step:,}" if per_step else "",
        f"{sample}s seen": f"{step * per_step:,}" if step and per_step else "",
    }


def _last(values: list[float]) -> str:
    return f"{values[-1]:.4f}" if values else ""


def _entry(entries: dict[str, Any], name: str) -> str:
    """Return the value as JSON, but without quotes around a nonempty string."""
    value = entries.get(name, NOT_SET)
    return value if isinstance(value, str) and value else json.dumps(value)


def _choices(runs: list[SavedRun]) -> list[str]:
    parts, names = [], [_short(run.name) for run in runs]
    for key in ("config", "environment"):
        differing, equal = differences([getattr(run, key) for run in runs])
        if differing:
            rows = [[f"≠ {name}", *map(_short, texts)] for name, texts in differing.items()]
            parts += ["", f"{key}: differences", "", table([key, *names], rows)]
        if equal:
            title = f"{key}: equal in all runs" if len(runs) > 1 else key
            parts += ["", title, "", *(f"  {name:20} {text}" for name, text in equal.items())]
    return parts


def _curves(runs: list[SavedRun]) -> list[str]:
    rows, last_step = [], max(run.metrics.last_step for run in runs)
    for name, title in CURVES.items():
        values_of_all = [value for run in runs for value in run.metrics.values(name)]
        for run in runs:
            if values := run.metrics.values(name):
                cells = [number(v, 4) for v in (values[0], min(values), max(values), values[-1])]
                low, high = min(values_of_all), max(values_of_all)
                line = sparkline(run.metrics.curves[name], low, high, last_step)
                rows.append([title, _short(run.name), len(values), *cells, line])
    if not rows:
        return []
    head = ["curve", "run", "values", "first", "lowest", "highest", "last", "over the steps"]
    return ["", "curves (each curve has the same scale for all runs)", "", table(head, rows)]


def _confusion(run: SavedRun) -> list[str]:
    predictions = run.predictions
    if predictions is None:
        return []
    classes = predictions.classes
    rows = [[f"{label} {classes[label]}", *row] for label, row in enumerate(predictions.confusion)]
    parts = ["", f"confusion matrix of {run.name}: {predictions.accuracy_text()}", ""]
    parts += [table(["true \\ predicted", *range(len(classes))], rows), ""]
    worst = [
        f"  {pair.images:,} of {pair.images_of_class:,} {pair.true} were misclassified as "
        f"{pair.predicted}"
        for pair in predictions.confusions()[:WORST]
    ]
    parts += ["the worst confusions:", *worst] if worst else ["no image was misclassified"]
    for mistake in predictions.mistakes[:1]:
        true, predicted = classes[mistake.label], classes[mistake.predicted]
        parts.append(
            f"the most confident mistake: test image {mistake.index} is {true}, "
            f"and was misclassified as {predicted} with probability {mistake.probability:.1%}"
        )
    return parts


def character_rows(run: SavedRun) -> list[list[str]]:
    """Return the cells below `CHARACTER_HEAD`, for the characters with the largest whole loss."""
    characters = run.characters or []
    whole = sum(each.times * each.loss for each in characters)
    return [
        [
            repr(each.character),
            f"{each.times:,}",
            f"{each.loss:.2f}",
            f"{each.times * each.loss / (whole or 1):.1%}",
            f"{each.accuracy:.1%}",
        ]
        for each in characters[:WORST_CHARACTERS]
    ]


def _characters(run: SavedRun) -> list[str]:
    if not (rows := character_rows(run)):
        return []
    title = f"characters with the largest part of the loss of {run.name}"
    return ["", title, "", table(CHARACTER_HEAD, rows)]


def _short(text: str) -> str:
    return text if len(text) <= WIDEST_CELL else text[: WIDEST_CELL - 1] + "…"

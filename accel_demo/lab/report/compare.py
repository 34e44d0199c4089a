"""What text and page say of several runs alike: the final figures, and where the choices differ."""

import json
from statistics import median
from typing import Any

from accel_demo.lab.report.files import is_count
from accel_demo.lab.report.metrics import last_step

UNKNOWN, NOT_SET = "unknown", "not set"


def compare(entries: list[dict | None]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The entries that differ between the runs, with a text for each run, and those that do not.

    `entries` has one run's config or environment each, None where it is unknown: such a run is not
    compared. With a single run nothing differs.
    """
    known = [one for one in entries if one is not None]
    differing, equal = {}, {}
    for name in dict.fromkeys(name for one in known for name in one):
        texts = [UNKNOWN if one is None else _text(one, name) for one in entries]
        if len({_text(one, name) for one in known}) == 1:
            equal[name] = _text(known[0], name)
        else:
            differing[name] = texts
    return differing, equal


def images_per_step(run: dict) -> int | None:
    """Images of all processes in one optimizer step, where config and environment tell."""
    config, environment = run["config"] or {}, run["environment"] or {}
    factors: list[Any] = [
        config.get("batch_size"),
        config.get("accumulate"),
        environment.get("processes"),
    ]
    if not all(is_count(factor, 10**9) and factor for factor in factors):
        return None
    images = factors[0] * factors[1] * factors[2]
    return images if images <= 10**9 else None


def final_figures(runs: list[dict]) -> dict[str, list[str]]:
    """The final table: for each figure a text for each run, "–" where it is unknown.

    Without a summary the accuracies come from the evaluations in metrics.jsonl, and images/s are
    the median of its lines.
    """
    columns = [_figures(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    table = {name: [column[name] or "–" for column in columns] for name in names}
    return {name: texts for name, texts in table.items() if set(texts) != {"–"}}


def number(value: float, digits: int = 6) -> str:
    """A value of a curve in at most so many digits: 0.000123457, 0.8815, 1,630.71."""
    return f"{value:,.{digits}g}"


def _figures(run: dict) -> dict[str, str]:
    summary, environment = run["summary"] or {}, run["environment"] or {}
    values = {
        name: [value for piece in pieces for _, value in piece]
        for name, pieces in run["metrics"]["curves"].items()
    }
    tested = values["test_accuracy"]
    speeds = values["images_per_second"]
    last = summary.get("test_accuracy", tested[-1] if tested else None)
    best = summary.get("best_test_accuracy", max(tested, default=None))
    speed, seconds = summary.get("images_per_second"), summary.get("train_seconds")
    memory = summary.get("peak_gpu_memory_bytes")
    speed_text = "" if speed is None else f"{speed:,.0f}"
    if speed is None and speeds:
        speed_text = f"{median(speeds):,.0f} (median of the lines)"
    step, images = last_step(run["metrics"]), images_per_step(run)
    return {
        "state": _state(run),
        "test accuracy": _share(last),
        "best test accuracy": _share(best),
        "test loss": "".join(f"{value:.4f}" for value in values["test_loss"][-1:]),
        "train loss, last interval": "".join(f"{v:.4f}" for v in values["train_loss"][-1:]),
        "images/s in training": speed_text,
        "seconds of training": "" if seconds is None else f"{seconds:,.1f}",
        "optimizer steps": f"{step:,}" if step else "",
        "images per step": f"{images:,}" if images else "",
        "images seen": f"{step * images:,}" if step and images else "",
        "processes": _text(environment, "processes", ""),
        "device": _text(environment, "device", ""),
        "peak GPU memory": "" if memory is None else f"{memory / 1024**3:.2f} GiB",
    }


def _state(run: dict) -> str:
    if run["summary"] is not None:
        return "finished"
    reasons = [one["says"] for one in run["problems"] if one["file"] == "summary.json"]
    return "not finished" if reasons[0].startswith("is missing") else "summary.json is damaged"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _text(entries: dict, name: str, missing: str = NOT_SET) -> str:
    """An entry as its file has it; a text without its quotes, unless it is empty."""
    if name not in entries:
        return missing
    value = entries[name]
    return value if isinstance(value, str) and value else json.dumps(value)

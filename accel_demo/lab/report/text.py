"""Several runs as text for a terminal: figures, choices, curves, confusion matrices, remarks."""

from accel_demo.lab.report.compare import compare, final_figures, number
from accel_demo.lab.report.metrics import CURVES, last_step
from accel_demo.lab.report.predictions import accuracy, worst_confusions
from accel_demo.lab.report.runs import line_count, where
from accel_demo.show import table

SPARKS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # characters of a sparkline
WIDEST = 40  # characters of a cell; the page and the JSON have it all
MOST_PROBLEMS = 20  # printed per run; the page and the JSON have them all
WIDEST_MATRIX = 20  # classes; a larger matrix does not fit on a terminal


def as_text(runs: list[dict]) -> str:
    """All of the report but the images. The texts of `runs` are printable: see `read_run`."""
    parts = [*_figures(runs), *_choices(runs), *_curves(runs)]
    for run in runs:
        parts += _confusion(run)
    return "\n".join([*parts, *_problems(runs)])


def _figures(runs: list[dict]) -> list[str]:
    rows = [[name, *map(_short, texts)] for name, texts in final_figures(runs).items()]
    return [table(["figure", *(run["name"] for run in runs)], rows)]


def _choices(runs: list[dict]) -> list[str]:
    parts, names = [], [run["name"] for run in runs]
    for key in ("config", "environment"):
        differing, equal = compare([run[key] for run in runs])
        if differing:
            rows = [[f"≠ {_short(name)}", *map(_short, texts)] for name, texts in differing.items()]
            parts += ["", f"{key}: what differs", "", table([key, *names], rows)]
        if equal:
            same = f"{key}: equal in all runs" if len(runs) > 1 else key
            parts += ["", same, "", *(f"  {name:20} {text}" for name, text in equal.items())]
    return parts


def _curves(runs: list[dict]) -> list[str]:
    rows, last = [], max(last_step(run["metrics"]) for run in runs)
    for name, title in CURVES.items():
        found = [(run["name"], run["metrics"]["curves"][name]) for run in runs]
        points = [point for _, pieces in found for piece in pieces for point in piece]
        for run_name, pieces in found:
            values = [value for piece in pieces for _, value in piece]
            if values:
                some = (values[0], min(values), max(values), values[-1])
                spark = sparkline(pieces, points, last)
                rows.append(
                    [title, run_name, len(values), *(number(one, 4) for one in some), spark]
                )
    if not rows:
        return []
    head = ["curve", "run", "values", "first", "lowest", "highest", "last", "over the steps"]
    return ["", "curves: the runs of a curve are drawn on one scale", "", table(head, rows)]


def sparkline(pieces: list[list], points: list[list], last: int) -> str:
    """One run's curve in `WIDTH` characters, on the scale of `points`, over the steps to `last`.

    Between two values it is a straight line; where several fall on one character, the last counts.
    """
    low, high = min(value for _, value in points), max(value for _, value in points)
    line = [" "] * WIDTH
    for piece in pieces:
        places = [(round(step / (last or 1) * (WIDTH - 1)), value) for step, value in piece]
        for (start, before), (end, after) in zip(places[:1] + places, places, strict=False):
            for place in range(start, end + 1):
                share = (place - start) / (end - start) if end > start else 1
                value = before + (after - before) * share
                height = (value - low) / (high - low) if high > low else 0.5
                line[place] = SPARKS[round(height * (len(SPARKS) - 1))]
    return "".join(line)


def _confusion(run: dict) -> list[str]:
    predictions = run["predictions"]
    if predictions is None:
        return []
    right, images = accuracy(predictions)
    parts = ["", f"confusion matrix of {run['name']}: {right:,} of {images:,} test images right"]
    names = predictions["classes"]
    if len(names) <= WIDEST_MATRIX:
        rows = [
            [f"{label} {name}", *row]
            for label, (name, row) in enumerate(zip(names, predictions["confusion"], strict=True))
        ]
        parts += ["", table(["true \\ predicted", *range(len(names))], rows)]
    worst = [
        f"  {one['images']:,} of {one['of']:,} {one['true']} were taken for {one['predicted']}"
        for one in worst_confusions(predictions)
    ]
    parts += ["", "the worst confusions:", *worst] if worst else ["", "there is no confusion"]
    for mistake in predictions["mistakes"][:1]:
        true, said = names[mistake["label"]], names[mistake["predicted"]]
        parts.append(
            f"the surest mistake: test image {mistake['index']} is {true}, "
            f"and was taken for {said} with probability {mistake['probability']:.1%}"
        )
    return parts


def _problems(runs: list[dict]) -> list[str]:
    parts = []
    for run in runs:
        problems = run["problems"]
        parts.append(f"  {run['name']}: {line_count(run)}")
        width = max((len(where(problem)) for problem in problems[:MOST_PROBLEMS]), default=0)
        for problem in problems[:MOST_PROBLEMS]:
            parts.append(f"    {where(problem):{width}}  {problem['says']}")
        if len(problems) > MOST_PROBLEMS:
            rest = len(problems) - MOST_PROBLEMS
            parts.append(f"    and {rest:,} more of these, in the page and the JSON")
    return ["", "what was read", "", *parts]


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"

"""Write the HTML page of `accel-demo report`, with the runs side by side."""

from pathlib import Path

from accel_demo.lab.report import curves
from accel_demo.lab.report.runs import CURVES, Mistake, Point, Predictions, SavedRun
from accel_demo.lab.report.tables import (
    CHARACTER_HEAD,
    WORST,
    character_rows,
    differences,
    final_figures,
)
from accel_demo.lab.web_page import PAGE_COLORS, escape, html_table, ink_on, write_page

STYLE = Path(__file__).with_name("page.css")
SCRIPT = Path(__file__).with_name("page.js")
RIGHT_COLOR, WRONG_COLOR = (0, 114, 178), (213, 94, 0)  # blue and orange from show.COLORS
NO_PREDICTIONS = "<p>This run has no readable predictions.</p>"


def write_report(path: Path, runs: list[SavedRun]) -> None:
    """Write the report as one HTML page. The same runs always produce the same bytes."""
    names = [run.name for run in runs]
    title = f"Report of {', '.join(names[:3])}" + (" and others" if len(names) > 3 else "")
    heading = f"{len(runs)} runs" if len(runs) > 1 else f"the run {escape(names[0])}"
    points = {name: [curves.thinned(run.metrics.curves[name]) for run in runs] for name in CURVES}
    body = [
        f"<header><h1>Report of {heading}</h1></header><main>",
        *(_figures(runs), _problems(runs), _curves(runs, points), _confusion(runs)),
        *(_mistakes(runs), _characters(runs), _choices(runs), "</main>"),
    ]
    data = {  # for the tooltips in page.js
        "names": names,
        "colors": [curves.style_of(index).color for index in range(len(runs))],
        "samplesPerStep": [run.images_per_step for run in runs],
        "curves": points,
        "box": {
            **{"width": curves.WIDTH, "left": curves.LEFT, "right": curves.RIGHT},
            **{"top": curves.TOP, "bottom": curves.BOTTOM},
        },
    }
    style, script = STYLE.read_text(encoding="utf-8"), SCRIPT.read_text(encoding="utf-8")
    write_page(path, title, "\n".join(body), style, script, data)


def _figures(runs: list[SavedRun]) -> str:
    rows = final_figures(runs)
    if len(runs) == 1:
        return f"<h2>Final results</h2>{_list({name: text for name, (text,) in rows.items()})}"
    return f"<h2>Final results</h2>{_table('result', rows, runs)}"


def _problems(runs: list[SavedRun]) -> str:
    parts = []
    for heading, run in zip(_headings(runs), runs, strict=True):
        if run.problems:
            rows = [[problem.file, escape(problem.message)] for problem in run.problems]
            parts.append(f"{heading}<p>{run.lines_text()}.</p>")
            parts.append(html_table("problems", ["file", "problem"], rows, "problems"))
    return f"<h2>Missing or unusable</h2>{''.join(parts)}" if parts else ""


def _curves(runs: list[SavedRun], points: dict[str, list[list[Point]]]) -> str:
    drawn = [run for run in runs if run.metrics.lines_drawn]
    if not drawn:
        return "<h2>Curves</h2><p>No run has a curve.</p>"
    per_step = {run.images_per_step for run in drawn}
    axes = [("by-steps", "optimizer step", [1] * len(runs))]
    if None not in per_step:
        axes.append(("by-images", "samples seen", [run.images_per_step or 0 for run in runs]))
    plots = []
    for css_class, axis, factors in axes:
        lasts = [run.metrics.last_step * factor for run, factor in zip(runs, factors, strict=True)]
        for name, title in CURVES.items():
            lines = [
                [(step * factor, value) for step, value in run_points]
                for run_points, factor in zip(points[name], factors, strict=True)
            ]
            if picture := curves.chart(name, title, lines, axis, max(lasts)):
                tip = '<div class="tip" role="status" hidden></div>'
                picture = f"<h3>{title}</h3><div>{picture}{tip}</div>"
                plots.append(f'<div class="plot {css_class}">{picture}</div>')
    legend = "".join(f"<li>{name}</li>" for name in _names(runs)) if len(runs) > 1 else ""
    return (
        f'<h2>Curves</h2>{_axis_choice(per_step)}<ul class="legend">{legend}</ul>'
        f'<div class="charts">{"".join(plots)}</div>'
        '<p class="soft hint">To read the values, point at a chart, or tab to it and use the arrow '
        "keys. Train values are means over one log interval. Test values are means over the whole "
        "test set.</p>"
    )


def _axis_choice(per_step: set[int | None]) -> str:
    """Return radio buttons for the horizontal axis, or "" if the samples per step are unknown."""
    if None in per_step:
        return ""
    note, over_steps, over_images = "", " checked", ""
    if len(per_step) > 1:
        note = "<p>The runs differ in samples per step, so compare them by samples seen.</p>"
        over_steps, over_images = "", " checked"
    return (
        f'{note}<fieldset class="axes"><legend>Horizontal axis</legend>'
        f'<label><input type="radio" name="axis" id="steps"{over_steps}>steps</label>'
        f'<label><input type="radio" name="axis" id="images"{over_images}>samples seen</label>'
        "</fieldset>"
    )


def _confusion(runs: list[SavedRun]) -> str:
    """Return each run's confusion matrix as a heat map, with a list of the worst confusions."""
    if all(run.is_text for run in runs):
        return ""
    pairs = [pair for run in runs if run.predictions for pair in run.predictions.confusions()]
    largest = max((pair.images / pair.images_of_class for pair in pairs), default=1)
    css_class = ' class="alone"' if len(runs) == 1 else ""
    sections = []
    for run in runs:
        if predictions := run.predictions:
            worst = "".join(
                f"<li>{pair.images:,} of {pair.images_of_class:,} <b>{escape(pair.true)}</b> "
                f"misclassified as <b>{escape(pair.predicted)}</b></li>"
                for pair in predictions.confusions()[:WORST]
            )
            worst = worst and f'<h3>The worst confusions</h3><ol class="worst">{worst}</ol>'
            sections.append(
                f"<p>{predictions.accuracy_text()}</p><div{css_class}>"
                f"{_matrix(predictions, largest)}<div>{worst}</div></div>"
            )
        else:
            sections.append(NO_PREDICTIONS)
    same_scales = " The scales are the same for all runs." if len(runs) > 1 else ""
    return (
        "<h2>Confusion matrix</h2>"
        '<p class="soft">Rows are true classes, and columns are predicted classes. A cell has a '
        "stronger color if it contains a larger fraction of the images in its row. Blue cells are "
        "correct predictions, on a color scale from 0 to 100%. Orange cells are mistakes, on a "
        f"color scale from 0 to {largest:.1%}.{same_scales}</p>"
        f"{_side_by_side(runs, sections)}"
    )


def _matrix(predictions: Predictions, largest: float) -> str:
    heads = [f"<span>{escape(name)}</span>" for name in predictions.classes]
    rows = []
    for label, (name, row) in enumerate(
        zip(predictions.classes, predictions.confusion, strict=True)
    ):
        cells = [
            _cell(images, images / (sum(row) or 1), label == predicted, largest)
            for predicted, images in enumerate(row)
        ]
        rows.append([escape(name), *cells])
    return html_table("confusion matrix", ["true ↓<br>predicted →", *heads], rows, "confusion")


def _cell(images: int, share: float, is_right: bool, largest: float) -> str:
    """Return a table cell. The larger `share` (its fraction of the row), the stronger its color.

    Mistakes have a separate color scale, because they would be too pale on the blue scale. The cell
    contains its colors on a light and on a dark page, and page.css chooses between them.
    """
    strength = share if is_right else share / largest
    full_color = RIGHT_COLOR if is_right else WRONG_COLOR
    style = []
    for theme, empty in PAGE_COLORS.items():
        red, green, blue = (
            round(start + (end - start) * strength)
            for start, end in zip(empty, full_color, strict=True)
        )
        ink = ink_on((red, green, blue)) if images else "var(--soft)"
        style.append(f"--{theme}:rgb({red},{green},{blue});--{theme}-ink:{ink}")
    return f'<div style="{";".join(style)}">{images}</div>'


def _characters(runs: list[SavedRun]) -> str:
    """Return tables of the characters with the largest loss, or "" if no run is about text."""
    if not any(run.characters for run in runs):
        return ""
    sections = []
    for run in runs:
        rows = [[escape(cell) for cell in row] for row in character_rows(run)]
        table = html_table("characters", CHARACTER_HEAD, rows, "numbers")
        sections.append(table if rows else NO_PREDICTIONS)
    return f"<h2>Characters with the largest part of the loss</h2>{_side_by_side(runs, sections)}"


def _mistakes(runs: list[SavedRun]) -> str:
    if all(run.is_text for run in runs):
        return ""
    sections = []
    for run in runs:
        if run.predictions is None:
            sections.append(NO_PREDICTIONS)
        elif not run.predictions.mistakes:
            sections.append("<p>This run made no mistakes.</p>")
        else:
            classes = run.predictions.classes
            items = [_mistake(mistake, classes) for mistake in run.predictions.mistakes]
            sections.append(f'<ul class="mistakes">{"".join(items)}</ul>')
    return (
        "<h2>Most confident mistakes</h2>"
        '<p class="soft">The wrong predictions with the highest probabilities, each with the '
        f"predicted class, its probability and the true class.</p>{_side_by_side(runs, sections)}"
    )


def _mistake(mistake: Mistake, classes: list[str]) -> str:
    true, predicted = escape(classes[mistake.label]), escape(classes[mistake.predicted])
    what = f"test image {mistake.index}: {true}, misclassified as {predicted}"
    source = f"data:image/png;base64,{escape(mistake.png)}"
    return (
        f'<li><img src="{source}" alt="{what}" title="{what}">'
        f"<b>{predicted}</b> {mistake.probability:.1%}<br>true: {true}</li>"
    )


def _choices(runs: list[SavedRun]) -> str:
    parts = []
    for key in ("config", "environment"):
        differing, equal = differences([getattr(run, key) for run in runs])
        parts.append(f"<h2>{key.capitalize()}</h2>")
        if differing:
            parts.append(f"<h3>Differences</h3>{_table('name', differing, runs, 'differs')}")
        if equal:
            parts.append(f"{'<h3>Equal in all runs</h3>' if len(runs) > 1 else ''}{_list(equal)}")
        if not differing and not equal:
            parts.append("<p>Unknown.</p>")
    return "\n".join(parts)


def _list(entries: dict[str, str]) -> str:
    """Return an HTML list of names and values, in as many columns as fit on the page."""
    parts = [
        f"<div><dt>{_breakable(name)}</dt><dd>{_breakable(text)}</dd></div>"
        for name, text in entries.items()
    ]
    return f'<dl class="same">{"".join(parts)}</dl>'


def _table(
    corner: str, texts: dict[str, list[str]], runs: list[SavedRun], css_class: str = ""
) -> str:
    """Return a table with one column per run."""
    rows = [[_breakable(cell) for cell in (name, *cells)] for name, cells in texts.items()]
    return html_table("runs side by side", [corner, *_names(runs)], rows, f"runs {css_class}")


def _breakable(text: str) -> str:
    """Escape the text for HTML, and allow a line break after each underscore."""
    return escape(text).replace("_", "_<wbr>")


def _side_by_side(runs: list[SavedRun], contents: list[str]) -> str:
    sections = [
        f"<section>{heading}{content}</section>"
        for heading, content in zip(_headings(runs), contents, strict=True)
    ]
    return f'<div class="beside">{"".join(sections)}</div>'


def _headings(runs: list[SavedRun]) -> list[str]:
    """Return a heading for each run, or [""] if there is only one run."""
    return [f"<h3>{name}</h3>" for name in _names(runs)] if len(runs) > 1 else [""]


def _names(runs: list[SavedRun]) -> list[str]:
    """Return the name of each run as HTML, preceded by a sample of the run's line."""
    return [curves.swatch(index) + _breakable(run.name) for index, run in enumerate(runs)]

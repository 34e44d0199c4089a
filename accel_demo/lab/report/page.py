"""Several runs as one self-contained HTML page, the runs side by side. Needs no torch."""

from pathlib import Path

from accel_demo.lab.report import curves
from accel_demo.lab.report.compare import compare, final_figures, images_per_step
from accel_demo.lab.report.images import confusions, mistakes
from accel_demo.lab.report.metrics import CURVES, last_step
from accel_demo.lab.report.runs import line_count, where
from accel_demo.lab.web_page import escape, write_page

STYLE = Path(__file__).with_name("page.css")
SCRIPT = Path(__file__).with_name("page.js")
MOST_PROBLEMS = 20  # shown at once; the rest can be unfolded


def write_report(path: Path, runs: list[dict]) -> None:
    """Write the page. The same runs give the same bytes."""
    names = [run["name"] for run in runs]
    title = f"Report of {', '.join(names[:3])}" + (" and others" if len(names) > 3 else "")
    many = f"{len(runs)} runs" if len(runs) > 1 else f"the run <bdi>{escape(names[0])}</bdi>"
    body = [
        f"<header><h1>Report of {many}</h1></header>",
        *("<main>", _figures(runs), _problems(runs), _curves(runs), confusions(runs)),
        *(mistakes(runs), _choices(runs), "</main>"),
    ]
    write_page(
        *(path, title, "\n".join(body)),
        style=STYLE.read_text(encoding="utf-8"),
        script=SCRIPT.read_text(encoding="utf-8"),
        data=_data(runs),
    )


def _data(runs: list[dict]) -> dict:
    """What page.js shows: the values drawn, and where in the pictures they are."""
    return {
        "runs": [
            {
                "name": run["name"],
                "colour": curves.mark_of(index)["colour"],
                "images_per_step": images_per_step(run) or 1,
            }
            for index, run in enumerate(runs)
        ],
        "curves": {
            name: [curves.thinned(run["metrics"]["curves"][name]) for run in runs]
            for name in CURVES
        },
        "box": {
            **{"width": curves.WIDTH, "height": curves.HEIGHT, "left": curves.LEFT},
            **{"right": curves.RIGHT, "top": curves.TOP, "bottom": curves.BOTTOM},
        },
    }


def _legend(names: list[str]) -> str:
    entries = [
        f"<li>{curves.swatch(index)}<bdi>{escape(name)}</bdi></li>"
        for index, name in enumerate(names)
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _figures(runs: list[dict]) -> str:
    rows = final_figures(runs)
    if len(runs) == 1:
        return f"<h2>Final figures</h2>{_list({name: text for name, (text,) in rows.items()})}"
    return f"<h2>Final figures</h2>{_table('figures', 'figure', rows, runs)}"


def _list(entries: dict[str, str]) -> str:
    """Names and texts in as many columns as fit."""
    parts = [
        f"<div><dt>{_foldable(name)}</dt><dd><bdi>{_foldable(text)}</bdi></dd></div>"
        for name, text in entries.items()
    ]
    return f'<dl class="same">{"".join(parts)}</dl>'


def _table(kind: str, corner: str, rows: dict[str, list[str]], runs: list[dict], mark="") -> str:
    """A table with a column for each run; the class `mark` for each of its rows."""
    heads = "".join(
        f'<th scope="col">{curves.swatch(index) if len(runs) > 1 else ""}'
        f"<bdi>{_foldable(run['name'])}</bdi></th>"
        for index, run in enumerate(runs)
    )
    lines = [
        f'<tr class="{mark}"><th scope="row">{_foldable(name)}</th>'
        + "".join(f"<td><bdi>{_foldable(text)}</bdi></td>" for text in texts)
        + "</tr>"
        for name, texts in rows.items()
    ]
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr><th scope="col">{corner}</th>{heads}'
        f"</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _foldable(text: str) -> str:
    """The text, escaped, and with places where a narrow column may break a long name."""
    return escape(text).replace("_", "_<wbr>")


def _problems(runs: list[dict]) -> str:
    parts = []
    for index, run in enumerate(runs):
        if run["problems"]:
            head = f"{curves.swatch(index)}<bdi>{escape(run['name'])}</bdi>"
            parts.append(f"<h3>{head}</h3>" if len(runs) > 1 else "")
            parts.append(f"<p>{line_count(run)}.</p>")
            parts.append(_remarks(run["problems"][:MOST_PROBLEMS]))
        if rest := run["problems"][MOST_PROBLEMS:]:
            more = f"<summary>{len(rest):,} more of these</summary>"
            parts.append(f"<details>{more}{_remarks(rest)}</details>")
    return f"<h2>Missing, damaged or skipped</h2>{''.join(parts)}" if parts else ""


def _remarks(problems: list[dict]) -> str:
    rows = [
        f'<tr><th scope="row">{where(problem)}</th><td>{escape(problem["says"])}</td></tr>'
        for problem in problems
    ]
    return (
        '<div class="wide"><table class="remarks"><thead><tr><th scope="col">file</th>'
        '<th scope="col">what is wrong</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _curves(runs: list[dict]) -> str:
    drawn = [run for run in runs if run["metrics"]["drawn"]]
    if not drawn:
        return "<h2>Curves</h2><p>No run has a line to draw.</p>"
    factors = [images_per_step(run) or 0 for run in runs]
    is_known = all(images_per_step(run) for run in drawn)
    differ = is_known and len({images_per_step(run) for run in drawn}) > 1
    last = [last_step(run["metrics"]) for run in runs]
    axes = [("by-steps", "optimizer step", [1] * len(runs), max(last))]
    if is_known:
        most = max(step * factor for step, factor in zip(last, factors, strict=True))
        axes.append(("by-images", "images seen", factors, most))
    plots = []
    for name, title in CURVES.items():
        pieces = [run["metrics"]["curves"][name] for run in runs]
        for kind, axis, per_step, right in axes:
            if picture := curves.chart(name, title, pieces, per_step, axis, right):
                tip = '<div class="tip" role="status" hidden></div>'
                picture = f"<h3>{title}</h3><div>{picture}{tip}</div>"
                plots.append(f'<div class="plot {kind}">{picture}</div>')
    return "\n".join(
        [
            "<h2>Curves</h2>",
            _axes(is_known, differ),
            _legend([run["name"] for run in runs]) if len(runs) > 1 else "",
            f'<div class="charts">{"".join(plots)}</div>',
            '<p class="soft hint">Point at a curve, or tab to it and use the arrow keys, to read '
            "its values. A train value is the mean of one interval of the log, a test value that "
            "of the whole test set.</p>",
        ]
    )


def _axes(is_known: bool, differ: bool) -> str:
    """The choice of what is to the right, where the images per step of all runs are known."""
    if not is_known:
        return ""
    chosen = {"steps": "" if differ else " checked", "images": " checked" if differ else ""}
    buttons = "".join(
        f'<label><input type="radio" name="axis" id="{name}"{chosen[name]}>{text}</label>'
        for name, text in (("steps", "steps"), ("images", "images seen"))
    )
    note = (
        "<p>One step is not as many images in each of them: compare them over images seen.</p>"
        if differ
        else ""
    )
    return f'{note}<fieldset class="axes"><legend>Draw over</legend>{buttons}</fieldset>'


def _choices(runs: list[dict]) -> str:
    parts = []
    for key, title in (("config", "Config"), ("environment", "Environment")):
        differing, equal = compare([run[key] for run in runs])
        parts.append(f"<h2>{title}</h2>")
        if not differing and not equal:
            parts.append("<p>It is unknown.</p>")
        if differing:
            parts += [
                "<h3>What differs</h3>",
                _table("choices", "name", differing, runs, "differs"),
            ]
        if equal:
            parts += ["<h3>Equal in all runs</h3>" if len(runs) > 1 else "", _list(equal)]
    return "\n".join(parts)

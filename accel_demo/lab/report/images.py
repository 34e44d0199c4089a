"""The confusion matrices as heat maps, and the surest mistakes with their images, as HTML."""

from accel_demo.lab.report.curves import swatch
from accel_demo.lab.report.predictions import accuracy, worst_confusions
from accel_demo.lab.web_page import escape

RIGHT, WRONG = (0, 114, 178), (213, 94, 0)  # of Okabe and Ito's colours, as in show.COLOURS
WIDEST_MATRIX = 30  # classes; of more, only the worst confusions are named


def confusions(runs: list[dict]) -> str:
    """A heat map for each run, side by side, and its worst confusions."""
    deepest = max((_largest_share(run["predictions"]) for run in runs), default=0)
    parts = []
    for run, head in zip(runs, _heads(runs), strict=True):
        predictions = run["predictions"]
        if predictions is None:
            parts.append(f"<section>{head}<p>It has no predictions that can be read.</p></section>")
            continue
        right, images = accuracy(predictions)
        parts.append(
            f"<section>{head}<p>{right:,} of {images:,} test images right</p>"
            f'<div class="{"alone" if len(runs) == 1 else "pair"}">'
            f"{_matrix(predictions, deepest)}{_worst(predictions)}</div></section>"
        )
    alike = " All runs have the same scales." if len(runs) > 1 else ""
    return (
        "<h2>Confusion matrix</h2>"
        '<p class="soft">Row: true class. Column: predicted class. The deeper, the larger the '
        "share of its row: blue where right, on a scale from 0 to 100%; orange where wrong, on "
        f"one from 0 to {deepest or 1:.1%}.{alike}</p>"
        f'<div class="beside">{"".join(parts)}</div>'
    )


def mistakes(runs: list[dict]) -> str:
    """The wrong answers each run was surest of, with their images, side by side."""
    parts = []
    for run, head in zip(runs, _heads(runs), strict=True):
        predictions = run["predictions"]
        if predictions is None:
            text = "<p>It has no predictions that can be read.</p>"
        elif not predictions["mistakes"]:
            text = "<p>There are none.</p>"
        else:
            names = predictions["classes"]
            shown = "".join(_mistake(mistake, names) for mistake in predictions["mistakes"])
            text = f'<ul class="mistakes">{shown}</ul>'
        parts.append(f"<section>{head}{text}</section>")
    return (
        "<h2>Surest mistakes</h2>"
        '<p class="soft">The wrong answers with the highest probability, highest first: what the '
        "model said, how sure it was, and the true class.</p>"
        f'<div class="beside">{"".join(parts)}</div>'
    )


def _heads(runs: list[dict]) -> list[str]:
    if len(runs) == 1:
        return [""]
    names = [escape(run["name"]) for run in runs]
    return [f"<h3>{swatch(index)}<bdi>{name}</bdi></h3>" for index, name in enumerate(names)]


def _matrix(predictions: dict, deepest: float) -> str:
    names, confusion = predictions["classes"], predictions["confusion"]
    if len(names) > WIDEST_MATRIX:
        return f"<p>A matrix of {len(names)} classes is too large to be shown.</p>"
    heads = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = []
    for label, row in enumerate(confusion):
        cells = "".join(
            _cell(images, images / sum(row) if images else 0, label == predicted, deepest)
            for predicted, images in enumerate(row)
        )
        rows.append(f'<tr><th scope="row">{escape(names[label])}</th>{cells}</tr>')
    return (
        '<div class="wide"><table class="confusion"><thead><tr>'
        f'<td class="corner">true ↓<br>predicted →</td>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(images: int, share: float, is_right: bool, deepest: float) -> str:
    """A count on its shade. The errors have a scale of their own, or none of them would show."""
    strength = share if is_right else share / (deepest or 1)
    colour = [round(255 + (c - 255) * strength) for c in (RIGHT if is_right else WRONG)]
    brightness = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    ink = "#fff" if brightness < 140 else "#1b1f24" if images else "#8c959f"
    background = "#{:02x}{:02x}{:02x}".format(*colour)
    return f'<td style="background:{background};color:{ink}">{images}</td>'


def _worst(predictions: dict) -> str:
    worst = "".join(
        f"<li>{one['images']:,} of {one['of']:,} <b>{escape(one['true'])}</b> taken for "
        f"<b>{escape(one['predicted'])}</b></li>"
        for one in worst_confusions(predictions)
    )
    return (
        f'<div><h3>The worst confusions</h3><ol class="worst">{worst}</ol></div>' if worst else ""
    )


def _mistake(mistake: dict, names: list[str]) -> str:
    true, said = escape(names[mistake["label"]]), escape(names[mistake["predicted"]])
    what = f"test image {mistake['index']}: {true}, taken for {said}"
    image = '<span class="none">no image</span>'
    if mistake["png"]:  # checked to be base64
        image = f'<img src="data:image/png;base64,{mistake["png"]}" alt="{what}" title="{what}">'
    return f"<li>{image}<b>{said}</b> {mistake['probability']:.1%}<br>true: {true}</li>"


def _largest_share(predictions: dict | None) -> float:
    """The largest share of a class that goes to one wrong class."""
    rows = predictions["confusion"] if predictions else []
    return max(
        (
            images / sum(row)
            for label, row in enumerate(rows)
            for predicted, images in enumerate(row)
            if images and label != predicted
        ),
        default=0,
    )

"""Show what a trained model predicts for some test images.

accel-demo predict               # list the runs in runs/
accel-demo predict runs/train
accel-demo predict runs/train --index 0-39 --plot predictions.svg
"""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from accel_demo import show
from accel_demo.errors import UserError
from accel_demo.lab.output import write_json
from accel_demo.lab.run_list import print_runs
from accel_demo.options import Parser, check_outputs
from accel_demo.terminal import display

MOST_IMAGES = 200  # more images would make the picture too tall


@dataclass(frozen=True)
class Prediction:
    """The prediction for one test image, with the probability of the predicted class."""

    index: int
    true_class: str
    predicted_class: str
    probability: float


@dataclass(frozen=True)
class PredictResult:
    """The predictions of one trained model."""

    run: str
    predictions: list[Prediction]


def main(arguments: list[str]) -> int:
    """Print a table of true and predicted classes. Draw the images if matplotlib is installed."""
    options = make_parser().parse_args(arguments)
    if options.run is None:
        print_runs("predict", arguments, only_finished=True)
        return 0

    from accel_demo.data import load_datasets
    from accel_demo.run.folder import load_config

    config = load_config(options.run)
    _, test_set = load_datasets(config)
    indices = parse_indices(options.index or f"0-{min(10, len(test_set)) - 1}", len(test_set))
    predictions = predict(options.run, config, test_set, indices)
    rows = []
    for row in predictions:
        answer = "right" if row.predicted_class == row.true_class else "wrong"
        percent = round(100 * row.probability, 1)
        rows.append([row.index, row.true_class, row.predicted_class, percent, answer])
    display(show.table(["index", "true", "predicted", "probability (%)", "answer"], rows))
    if options.json:
        write_json(options.json, "predict", PredictResult(str(options.run), predictions))
    if importlib.util.find_spec("matplotlib"):
        options.plot = options.plot or options.run / "predictions.png"
        check_outputs(options)
        draw(test_set, predictions, options.plot)
        display(f"picture: {options.plot}")
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo predict")
    help = "folder of a finished run (without RUN: list the runs in runs/)"
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help=help)
    help = "indices of test images, such as 7, 0-9 or 3,5,7 (default: the first ten)"
    parser.add_argument("--index", metavar="N", help=help)
    parser.add_json()
    parser.add_plot("draw the images to FILE (default: predictions.png in the run folder)")
    return parser


def parse_indices(text: str, count: int) -> list[int]:
    """Parse "7", "0-9" or "3,5,7" into a list. Raise `UserError` if the text is invalid."""
    indices = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            stop = int(last if dash else first)
            if stop >= count:
                raise UserError(f"--index {stop} is too large. Choose 0 to {count - 1}.")
            indices += range(int(first), stop + 1)
    except ValueError:
        raise UserError(f"--index must be like 7, 0-9 or 3,5,7, got {text}") from None
    if not 1 <= len(indices) <= MOST_IMAGES:
        raise UserError(f"--index {text} selects {len(indices)} images. Select 1 to {MOST_IMAGES}.")
    return indices


def predict(run: Path, config, test_set, indices: list[int]) -> list[Prediction]:
    """Load the model from the run folder, and return its predictions for these test images."""
    import torch

    from accel_demo.models import make_model
    from accel_demo.run.folder import load_model

    model = make_model(replace(config, compile=False))
    load_model(run, model)
    model.eval()
    images, labels = test_set.__getitems__(indices)
    with torch.no_grad():
        probabilities, classes = model(images).softmax(dim=1).max(dim=1)
    names = test_set.class_names
    rows = zip(indices, labels.tolist(), classes.tolist(), probabilities.tolist(), strict=True)
    return [Prediction(index, names[label], names[guess], p) for index, label, guess, p in rows]


def draw(test_set, predictions: list[Prediction], picture: Path) -> None:
    """Draw five images per row. Their titles show the predicted class, in red if it is wrong."""
    rows = (len(predictions) + 4) // 5
    figure = show.new_figure(9, 2.2 * rows)
    axes = figure.subplots(rows, 5, squeeze=False).flatten()
    for axis in axes:
        axis.axis("off")
    for axis, row in zip(axes, predictions, strict=False):
        axis.imshow(test_set.pixels[row.index].squeeze(-1).numpy(), cmap="gray")
        title, color = f"{row.index}: {row.predicted_class} {row.probability:.0%}", "black"
        if row.predicted_class != row.true_class:
            title, color = f"{title}\ntrue class: {row.true_class}", "tab:red"
        axis.set_title(title, fontsize=9, color=color)
    show.save(figure, picture)

"""Show what a trained model says of some test images.

accel-demo predict runs/train
accel-demo predict runs/train --index 0-39 --plot predictions.svg
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.lab import flags

MOST_IMAGES = 200  # a picture of more is too tall


def main(arguments: list[str]) -> int:
    """Print a table of true and predicted class names; draw the images where matplotlib is."""
    parser = Parser(__doc__, prog="accel-demo predict")
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    help = "test images: 7, or 0-9, or 3,5,7 (default: the first ten)"
    parser.add_argument("--index", metavar="N", help=help)
    flags.add_json(parser)
    help = "where to draw them (default: predictions.png in the run's folder)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=help)
    options = flags.read(parser, arguments)

    from accel_demo.data import load_datasets
    from accel_demo.run.folder import load_config

    config = load_config(options.run)
    _, test_set = load_datasets(config)
    indices = parse_indices(options.index or f"0-{min(10, len(test_set)) - 1}", len(test_set))
    predictions = predict(options.run, config, test_set, indices)
    print(f"{'index':>5}  {'true':14}{'predicted':14}{'probability':>11}")
    for index, true, predicted, probability in predictions:
        mark = "" if true == predicted else "  wrong"
        print(f"{index:>5}  {true:14}{predicted:14}{probability:>11.1%}{mark}")
    if options.json:
        names = ("index", "true", "predicted", "probability")
        rows = [dict(zip(names, row, strict=True)) for row in predictions]
        flags.write_json(options.json, {"predictions": rows})
    if importlib.util.find_spec("matplotlib"):
        picture = options.plot or options.run / "predictions.png"
        draw(test_set, predictions, picture)
        print(f"picture: {picture}")
    return 0


def parse_indices(text: str, count: int) -> list[int]:
    """ "7", "0-9" or "3,5,7" as a list, all below `count`. Raises `UserError` for others."""
    indices = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            stop = int(last if dash else first)
            if stop >= count:
                raise UserError(
                    f"--index {stop} is too large: the test images are 0 to {count - 1}"
                )
            indices += range(int(first), stop + 1)
    except ValueError:
        raise UserError(f"--index takes 7, or 0-9, or 3,5,7; got {text}") from None
    if not 1 <= len(indices) <= MOST_IMAGES:
        raise UserError(f"--index {text} names {len(indices)} images: name 1 to {MOST_IMAGES}")
    return indices


def predict(run: Path, config, test_set, indices: list[int]) -> list[tuple[int, str, str, float]]:
    """(index, true class, predicted class, its probability) of each test image asked for."""
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
    return [(index, names[true], names[guess], share) for index, true, guess, share in rows]


def draw(test_set, predictions: list[tuple[int, str, str, float]], picture: Path) -> None:
    """The images in rows of five, each under what the model says; red where it is wrong."""
    from matplotlib.figure import Figure

    rows = (len(predictions) + 4) // 5
    figure = Figure(figsize=(9, 2.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 5, squeeze=False).flatten()
    for axis in axes:
        axis.axis("off")
    for axis, (index, true, predicted, probability) in zip(axes, predictions, strict=False):
        axis.imshow(test_set.pixels[index].squeeze(-1).numpy(), cmap="gray_r")
        title = f"{index}: {predicted} {probability:.0%}"
        if predicted != true:
            title += f"\ntruly {true}"
        axis.set_title(title, fontsize=9, color="black" if predicted == true else "tab:red")
    try:
        figure.savefig(picture, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw into {picture} ({error}): choose another --plot") from None

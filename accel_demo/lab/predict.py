"""Show what a trained model predicts for some test images, or how it continues a text.

accel-demo predict               # list the runs in runs/
accel-demo predict runs/train --index 0-39 --plot predictions.svg
accel-demo predict runs/train --prompt "Alice was " --length 400

The last command is for runs on text. It draws each character at random, with the probabilities that
the model predicts. The same --seed draws the same characters.
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
PROMPT, CHARACTERS, MOST_CHARACTERS = "Alice ", 300, 10_000


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


@dataclass(frozen=True)
class ContinuedText:
    """A prompt, and the text with which a model continues it."""

    run: str
    prompt: str
    continuation: str


def main(arguments: list[str]) -> int:
    """Print a table of true and predicted classes, or a text. Draw images with matplotlib."""
    options = make_parser().parse_args(arguments)
    if options.run is None:
        print_runs("predict", arguments, only_finished=True)
        return 0

    from accel_demo.data import load_images
    from accel_demo.run.folder import load_config

    config = load_config(options.run)
    if config.dataset == "text":
        refuse(options, ("index", "plot"), "text")
        return continue_prompt(options, config)
    refuse(options, ("prompt", "length", "seed"), "images")
    _, test_set = load_images(config)
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
    help = f"text to continue (default: {PROMPT!r})"
    parser.add_argument("--prompt", metavar="TEXT", help=help)
    help = f"characters to draw (default: {CHARACTERS})"
    parser.add_argument("--length", type=int, metavar="N", help=help)
    help = "seed of the random numbers that draw them (default: 0)"
    parser.add_argument("--seed", type=int, metavar="N", help=help)
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

    model = load(run, config)
    images, labels = test_set.__getitems__(indices)
    with torch.no_grad():
        probabilities, classes = model(images).softmax(dim=1).max(dim=1)
    names = test_set.class_names
    rows = zip(indices, labels.tolist(), classes.tolist(), probabilities.tolist(), strict=True)
    return [Prediction(index, names[label], names[guess], p) for index, label, guess, p in rows]


def refuse(options, names: tuple[str, ...], dataset: str) -> None:
    """Raise `UserError` if one of these options is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name} cannot be used with {options.run}, which is a run on {dataset}"
            )


def continue_prompt(options, config) -> int:
    """Print the prompt, and the text with which the model continues it."""
    import torch

    from accel_demo.text import decode, encode
    from accel_demo.tiny_gpt import continue_text

    prompt = PROMPT if options.prompt is None else options.prompt
    length = CHARACTERS if options.length is None else options.length
    seed = options.seed or 0
    if not 1 <= length <= MOST_CHARACTERS:
        raise UserError(f"--length must be from 1 to {MOST_CHARACTERS}, got {length}")
    if not 0 <= seed < 2**31:
        raise UserError(f"--seed must be from 0 to 2147483647, got {seed}")
    try:
        numbers = encode(prompt or "\n")
    except KeyError as unknown:
        raise UserError(
            f"the training text has no {unknown}. Use only its characters in --prompt."
        ) from None
    generator = torch.Generator().manual_seed(seed)
    text = decode(continue_text(load(options.run, config), numbers, length, generator))
    display(f"{prompt}{text[len(numbers) :]}")
    if options.json:
        result = ContinuedText(str(options.run), prompt, text[len(numbers) :])
        write_json(options.json, "predict", result)
    return 0


def load(run: Path, config):
    """Return the trained model in the run folder, ready for evaluation."""
    from accel_demo.models import make_model
    from accel_demo.run.folder import load_model

    model = make_model(replace(config, compile=False))
    load_model(run, model)
    return model.eval()


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

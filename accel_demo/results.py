"""Save the results of a finished run: the trained model and its predictions on the test set."""

import base64
import dataclasses
import io
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from accel_demo.config import TrainConfig
from accel_demo.data import ImageSet
from accel_demo.models import make_model
from accel_demo.processes.devices import autocast_for
from accel_demo.run.folder import save_model, write_json
from accel_demo.text import TextSet

MOST_MISTAKES = 24  # maximum number of wrong predictions to store with their images


def save_results(
    folder: Path,
    state_dict: dict[str, Any],
    config: TrainConfig,
    test_set: ImageSet | TextSet,
    precision: str,
    device: torch.device,
) -> None:
    """Write model.safetensors and predictions.json, or characters.json if the dataset is text.

    Call this in one process only.

    For the predictions, this process runs the model on the whole test set once more.
    `precision` is the precision of the training run: "no", "bf16" or "fp16".

    Weights that are already on the device are not copied, because a copy could raise the peak
    memory in summary.json above the peak of the training itself.
    """
    save_model(folder, state_dict)
    with torch.device("meta"):  # so that no memory is allocated
        model = make_model(dataclasses.replace(config, compile=False))
    model.load_state_dict(state_dict, assign=True)
    model.to(device)  # in case the weights are on the CPU
    logits = logits_of(model, test_set, config.eval_batch_size, precision, device)
    if isinstance(test_set, TextSet):
        write_json(folder / "characters.json", characters_of(logits, test_set))
    else:
        write_json(folder / "predictions.json", predictions_of(logits, test_set))


@torch.no_grad()
def logits_of(
    model: torch.nn.Module,
    test_set: ImageSet | TextSet,
    batch_size: int,
    precision: str,
    device: torch.device,
) -> torch.Tensor:
    """Return the logits of all test samples, in dataset order: float32 [N, classes] on the CPU.

    For text, the shape is [N, classes, T]. `precision` is the precision of the training run: "no",
    "bf16" or "fp16".
    """
    model.eval()
    logits = []
    with autocast_for(device, precision):
        for indices in torch.arange(len(test_set)).split(batch_size):
            images, _ = test_set.__getitems__(indices.tolist())
            logits.append(model(images.to(device)).float().cpu())
    return torch.cat(logits)


def predictions_of(logits: torch.Tensor, test_set: ImageSet) -> dict:
    """Return the confusion matrix, and the most confident mistakes with their images.

    `confusion[i][j]` is the number of images of class i that are predicted as class j. `mistakes`
    is sorted by the probability of the predicted class, highest first. Each `png` is a
    base64-encoded image. `logits` is float32 [N, classes].
    """
    labels = test_set.labels
    probabilities, predicted = logits.softmax(dim=1).max(dim=1)
    classes = len(test_set.class_names)
    pairs = torch.bincount(labels * classes + predicted, minlength=classes**2)
    wrong = (predicted != labels).nonzero().flatten()
    surest = wrong[probabilities[wrong].argsort(descending=True, stable=True)][:MOST_MISTAKES]
    mistakes = []
    for index in surest.tolist():
        mistakes.append(
            {
                "index": index,
                "label": labels[index].item(),
                "predicted": predicted[index].item(),
                "probability": probabilities[index].item(),
                "png": _png(test_set.pixels[index]),
            }
        )
    return {
        "classes": list(test_set.class_names),
        "confusion": pairs.reshape(classes, classes).tolist(),
        "mistakes": mistakes,
    }


def characters_of(logits: torch.Tensor, test_set: TextSet) -> dict:
    """Return how well each character of the test text is predicted.

    The characters with the largest part of the whole loss come first. `times` is how often a
    character occurs, `loss` is its mean loss in nats, and `accuracy` is how often it has the
    highest probability. `logits` is float32 [N, classes, T].
    """
    labels = test_set.labels.flatten()
    losses = F.cross_entropy(logits, test_set.labels, reduction="none").flatten()
    is_right = (logits.argmax(dim=1) == test_set.labels).flatten().float()
    times = labels.bincount(minlength=len(test_set.class_names))
    loss_of, right_of = (labels.bincount(values, len(times)) for values in (losses, is_right))
    characters = []
    for number in loss_of.argsort(descending=True, stable=True).tolist():
        if count := times[number].item():
            characters.append(
                {
                    "character": test_set.class_names[number],
                    "times": count,
                    "loss": loss_of[number].item() / count,
                    "accuracy": right_of[number].item() / count,
                }
            )
    return {"characters": characters}


def _png(pixels: torch.Tensor) -> str:
    """Return an image as a base64-encoded PNG. `pixels` is uint8 [H, W, C], with C = 1 or 3."""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1).numpy()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()

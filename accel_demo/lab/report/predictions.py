"""A run's predictions.json: the confusion matrix and the surest mistakes, each thing checked."""

import base64
import re
import struct
import zlib
from pathlib import Path

from accel_demo.lab.report.files import (
    Unreadable,
    is_count,
    is_number,
    kind_of,
    printable,
    read_object,
)

MOST_CLASSES = 1000
MOST_MISTAKES = 24
LONGEST_IMAGE = 64 * 1024  # characters of base64; an image of 32×32 pixels has about 3,000
LARGEST_SIDE = 1024  # pixels: a small file may unpack to gigabytes in the reader's browser
PNG_HEAD, PNG_TAIL = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\0\0\0\0IEND\xaeB`\x82"


def read_predictions(path: Path) -> tuple[dict, list[str]]:
    """Classes, confusion matrix and mistakes, and remarks on what of it is left out.

    A mistake whose image cannot be shown has the png "". Raises `Unreadable` where the file, its
    classes or its matrix is damaged.
    """
    content, remarks = read_object(path), []
    classes, confusion = content.get("classes"), content.get("confusion")
    if not isinstance(classes, list) or not 1 <= len(classes) <= MOST_CLASSES:
        raise Unreadable(f"has no list of 1 to {MOST_CLASSES} classes")
    if not all(isinstance(name, str) for name in classes):
        raise Unreadable("has a class whose name is no text")
    if not isinstance(confusion, list) or not all(_is_row(row, len(classes)) for row in confusion):
        raise Unreadable("has a confusion matrix that does not hold counts for each class")
    if len(confusion) != len(classes):
        raise Unreadable(f"has {len(confusion)} rows of confusion for {len(classes)} classes")
    mistakes = content.get("mistakes")
    if not isinstance(mistakes, list):
        remarks.append("has no list of mistakes")
        mistakes = []
    if len(mistakes) > MOST_MISTAKES:
        remarks.append(f"has {len(mistakes)} mistakes; the first {MOST_MISTAKES} are shown")
    kept = []
    for number, mistake in enumerate(mistakes[:MOST_MISTAKES], start=1):
        try:
            kept.append(_mistake(mistake, len(classes)))
            check_png(mistake.get("png"))
        except Unreadable as reason:
            remarks.append(f"has a mistake, number {number}, that {reason}")
        else:
            kept[-1]["png"] = mistake["png"]
    names = [printable(name, 40) for name in classes]
    return {"classes": names, "confusion": confusion, "mistakes": kept}, remarks


def check_png(text: object) -> None:
    """Raise `Unreadable` where this is not the base64 of a small PNG file that is all there.

    Source: https://www.w3.org/TR/png-3/#5PNG-file-signature
    """
    if not isinstance(text, str) or not text:
        raise Unreadable("has no image")
    if len(text) > LONGEST_IMAGE:
        raise Unreadable(f"has an image of more than {LONGEST_IMAGE // 1024} KiB")
    if not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", text) or len(text) % 4:
        raise Unreadable("has an image that is not base64")
    content = base64.b64decode(text)
    if not (content.startswith(PNG_HEAD) and content.endswith(PNG_TAIL) and _is_whole(content)):
        raise Unreadable("has an image that is no whole PNG")
    sides = struct.unpack(">II", content[16:24])
    if not all(1 <= side <= LARGEST_SIDE for side in sides):
        raise Unreadable(f"has an image of {sides[0]}×{sides[1]} pixels")


def accuracy(predictions: dict) -> tuple[int, int]:
    """How many test images the model has right, and how many there are."""
    confusion = predictions["confusion"]
    return sum(row[i] for i, row in enumerate(confusion)), sum(map(sum, confusion))


def worst_confusions(predictions: dict, most: int = 5) -> list[dict]:
    """The pairs of classes most often taken for one another: true, predicted, images, of so many.

    The first of two equal ones is that of the smaller class.
    """
    names, found = predictions["classes"], []
    for label, row in enumerate(predictions["confusion"]):
        for predicted, images in enumerate(row):
            if images and label != predicted:
                found.append((-images, label, predicted, sum(row)))
    return [
        {"true": names[label], "predicted": names[predicted], "images": -images, "of": of}
        for images, label, predicted, of in sorted(found)[:most]
    ]


def _is_whole(content: bytes) -> bool:
    """Whether every chunk (length, kind, data, checksum of both) is as it was written."""
    at = 8  # after the signature
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        if zlib.crc32(content[at + 4 : end]) != int.from_bytes(content[end : end + 4], "big"):
            return False
        at = end + 4
    return at == len(content)


def _is_row(row: object, classes: int) -> bool:
    return isinstance(row, list) and len(row) == classes and all(map(is_count, row))


def _mistake(mistake: object, classes: int) -> dict:
    if not isinstance(mistake, dict):
        raise Unreadable("is no object")
    for name, is_right in {
        "index": is_count,
        "label": lambda value: is_count(value, classes - 1),
        "predicted": lambda value: is_count(value, classes - 1),
        "probability": lambda value: is_number(value, 0, 1),
    }.items():
        if not is_right(mistake.get(name)):
            raise Unreadable(f"has the {name} {kind_of(mistake.get(name))}")
    kept = ("index", "label", "predicted", "probability")
    return {**{name: mistake[name] for name in kept}, "png": ""}

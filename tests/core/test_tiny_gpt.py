"""Test the packaged text, and that the small GPT learns it and sees no later characters."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from accel_demo import data
from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.metrics import batch_totals
from accel_demo.models import make_model
from accel_demo.text import CHARACTERS, LENGTH, TextSet, decode, encode
from accel_demo.tiny_gpt import continue_text
from tests.runs import lines_of, read, train_here

TEXT = {"model": "tiny_gpt", "dataset": "text"}


def entropy(counts: Counter) -> float:
    """Return the entropy of the counted items in nats."""
    whole = sum(counts.values())
    return -sum(count / whole * math.log(count / whole) for count in counts.values())


@pytest.fixture(scope="module")
def sets():
    return load_datasets(TrainConfig(**TEXT))


@pytest.fixture(scope="module")
def best_without_context(sets):
    """The lowest loss on the test text for a model that ignores all earlier characters."""
    return entropy(Counter(sets[1].labels.flatten().tolist()))


def test_the_label_of_each_character_is_the_next_one(sets):
    for part in sets:
        assert part.inputs.shape == part.labels.shape == (len(part), LENGTH)
        assert torch.equal(part.inputs.flatten()[1:], part.labels.flatten()[:-1])
    inputs, labels = sets[0].__getitems__([5, 3])
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs[1], sets[0][3][0]) and torch.equal(labels[1], sets[0][3][1])


def test_the_test_text_follows_the_training_text(sets):
    texts = [decode(part.inputs.flatten()) for part in sets]
    assert texts[0].startswith("  Alice was beginning to get very tired of sitting by her sister")
    assert texts[1].startswith(", I will just explain to you how it was done.")
    assert texts[1].endswith("and the happy summer day")  # the rest is shorter than a sequence
    assert set("".join(texts)) == set(CHARACTERS)
    assert len(texts[0]) > 8.9 * len(texts[1])


def test_a_sequence_needs_a_character_after_it():
    assert (len(TextSet("a" * 64)), len(TextSet("a" * 65)), len(TextSet("a" * 129))) == (0, 1, 2)
    assert decode(encode("Alice!\n")) == "Alice!\n"


def test_an_altered_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ASSETS", tmp_path)
    (tmp_path / "alice.txt").write_text("Alice")
    with pytest.raises(UserError, match="not the original file: its checksum differs. Install"):
        load_datasets(TrainConfig(**TEXT))


def test_a_later_character_does_not_change_earlier_logits():
    model = make_model(TrainConfig(**TEXT)).eval()
    numbers = torch.randint(len(CHARACTERS), (2, LENGTH))
    logits = model(numbers)
    assert logits.shape == (2, len(CHARACTERS), LENGTH)
    for position in (0, 31, LENGTH - 1):
        changed = numbers.clone()
        changed[:, position] = (changed[:, position] + 1) % len(CHARACTERS)
        differs = (model(changed) != logits).any(dim=1)
        assert not differs[:, :position].any() and differs[:, position:].all()


def test_the_totals_count_characters():
    labels = torch.randint(70, (3, LENGTH))
    logits = torch.randn(3, 70, LENGTH)
    loss, correct, count = batch_totals(logits, labels).tolist()
    assert count == 3 * LENGTH and correct == (logits.argmax(dim=1) == labels).sum()
    assert loss / count == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_the_gpt_can_memorize_a_few_sequences(sets):
    inputs, labels = sets[0].__getitems__(range(4))
    model = make_model(TrainConfig(**TEXT))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert F.cross_entropy(model(inputs), labels) < 0.5
    seed = torch.Generator().manual_seed(0)
    continued = continue_text(model, inputs[0, :32], 100, seed)  # more than fits into a sequence
    assert len(continued) == 132 and torch.equal(continued[:32], inputs[0, :32])
    again = continue_text(model, inputs[0, :32], 100, seed.manual_seed(0))
    assert torch.equal(continued, again)


def test_one_epoch_beats_every_model_without_context(tmp_path, best_without_context):
    run = train_here("train.py", tmp_path / "run", **TEXT, epochs=1, batch_size=32)
    (line,) = lines_of(run, "test_loss")
    assert line["test_loss"] < best_without_context - 0.2
    characters = read(run / "characters.json")["characters"]
    assert sum(each["times"] for each in characters) == 231 * LENGTH
    mean = sum(each["times"] * each["loss"] for each in characters) / (231 * LENGTH)
    assert mean == pytest.approx(line["test_loss"], rel=1e-5)
    right = sum(each["times"] * each["accuracy"] for each in characters) / (231 * LENGTH)
    assert right == pytest.approx(line["test_accuracy"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_default_run_beats_every_model_that_sees_one_character(processes, train, sets):
    """The bound is the entropy of a character of the test text, given the one before it."""
    flags = ["--model", "tiny_gpt", "--dataset", "text", "--batch-size", 128 // processes]
    run = train("train.py", *flags, processes=processes)
    text = decode(sets[1].inputs.flatten())
    bound = entropy(Counter(zip(text, text[1:], strict=False))) - entropy(Counter(text))
    assert lines_of(run, "test_loss")[-1]["test_loss"] < bound

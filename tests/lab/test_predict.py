"""Test that `accel-demo predict` shows the classes that a saved model predicts."""

import json

import pytest

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.data import FASHION_CLASSES
from accel_demo.errors import UserError
from accel_demo.lab import predict


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_plain.main(TrainConfig(max_steps=30, test_samples=200, run_dir=str(folder)))
    return folder


def test_true_and_predicted_classes_are_shown(run_dir, capsys):
    picture = run_dir / "some.png"
    assert predict.main([str(run_dir), "--index", "0-9", "--plot", str(picture)]) == 0
    header, _, *rows, last = capsys.readouterr().out.splitlines()
    assert cells_of(header) == ["index", "true", "predicted", "probability (%)", "answer"]
    rows = [cells_of(row) for row in rows]
    assert [int(index) for index, *_ in rows] == list(range(10))
    right = sum(true == predicted for _, true, predicted, *_ in rows)
    assert right >= 5, "30 steps are enough to beat chance"
    assert all({true, predicted} <= set(FASHION_CLASSES) for _, true, predicted, *_ in rows)
    assert sum(row[-1] == "wrong" for row in rows) == 10 - right
    assert last == f"picture: {picture}" and picture.read_bytes().startswith(b"\x89PNG")


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_json_file_contains_the_predictions(run_dir, tmp_path):
    file, picture = tmp_path / "predict.json", tmp_path / "p.png"
    arguments = ["--index", "3,5", "--plot", str(picture), "--json", str(file)]
    assert predict.main([str(run_dir), *arguments]) == 0
    content = json.loads(file.read_text())
    assert (content["command"], content["run"]) == ("predict", str(run_dir))
    assert [row["index"] for row in content["predictions"]] == [3, 5]
    assert content["predictions"][0]["true_class"] in FASHION_CLASSES


def test_without_matplotlib_only_the_table_is_shown(run_dir, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert predict.main([str(run_dir), "--index", "3,5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(UserError, match="pip install matplotlib"):
        predict.main([str(run_dir), "--plot", "x.png"])


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "text"
    choices = {"model": "tiny_gpt", "dataset": "text", "max_steps": 2, "batch_size": 8}
    train_plain.main(TrainConfig(**choices, test_samples=8, run_dir=str(folder)))
    return folder


def test_a_run_on_text_continues_a_prompt(text_run, tmp_path, capsys):
    texts = []
    for seed in ("0", "0", "1"):
        file = tmp_path / f"{len(texts)}.json"
        options = ["--prompt", "Alice was ", "--length", "90", "--seed", seed, "--json", str(file)]
        assert predict.main([str(text_run), *options]) == 0
        content = json.loads(file.read_text())
        assert content["prompt"] == "Alice was " and len(content["continuation"]) == 90
        texts.append(capsys.readouterr().out)
        assert texts[-1] == f"Alice was {content['continuation']}\n"
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "3"], "--index cannot be used with .*text, which is a run on text"),
        (["--plot", "x.png"], "--plot cannot be used with"),
        (["--prompt", "42"], "the training text has no '4'. Use only its characters in --prompt"),
        (["--length", "0"], "--length must be from 1 to 10000, got 0"),
        (["--seed", "-1"], "--seed must be from 0 to 2147483647, got -1"),
    ],
)
def test_invalid_options_for_a_text_are_a_one_sentence_error(arguments, message, text_run):
    with pytest.raises(UserError, match=message):
        predict.main([str(text_run), *arguments])


def test_a_run_on_images_has_no_prompt(run_dir):
    with pytest.raises(UserError, match="--prompt cannot be used with .*a run on images"):
        predict.main([str(run_dir), "--prompt", "Alice"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "200"], "--index 200 is too large. Choose 0 to 199"),
        (["--index", "0-99999999999"], "--index 99999999999 is too large"),
        (["--index", "9-0"], "selects 0 images. Select 1 to 200"),
        (["--index", "5-"], "--index must be like 7, 0-9 or 3,5,7, got 5-"),
        (["--index", "first"], "--index must be like 7, 0-9 or 3,5,7, got first"),
        (["--index", "-1"], "expected one argument|--index must be like"),
        (["--plot", "/proc/x.png"], "cannot write --plot /proc/x.png"),
    ],
)
def test_invalid_options_are_a_one_sentence_error(arguments, message, run_dir):
    with pytest.raises(UserError, match=message):
        predict.main([str(run_dir), *arguments])


def test_a_folder_without_a_finished_run_is_an_error(run_dir, tmp_path):
    with pytest.raises(UserError, match="does not contain a run"):
        predict.main([str(tmp_path)])
    (tmp_path / "config.json").write_bytes((run_dir / "config.json").read_bytes())
    with pytest.raises(UserError, match="the run has not finished"):
        predict.main([str(tmp_path)])
    whole = (run_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match="model.safetensors cannot be read"):
        predict.main([str(tmp_path)])

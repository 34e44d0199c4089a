"""Test that invalid input causes a one-line error and exit code 2, and creates no run folder."""

import json
import math
import shutil

import pytest

from accel_demo import data, train_plain
from accel_demo.config import CommandLine
from accel_demo.errors import UserError, one_line_errors
from accel_demo.run.folder import load_config
from tests.conftest import launcher

TEXT = ["--model", "tiny_gpt", "--dataset", "text"]
SHORT = ["--dataset", "synthetic", "--model", "tiny_cnn", "--max-steps", "2"]


def one_line(stderr: str) -> str:
    """Assert that stderr is one line that starts with `error: `, and return the rest of it."""
    assert stderr.startswith("error: ") and stderr.find("\n") == len(stderr) - 1, stderr
    return stderr.removeprefix("error: ")


@pytest.fixture
def mistake(tmp_path, capsys):
    """`mistake(*flags)` starts a run, asserts exit code 2, and returns the error message."""

    def mistake(*flags, run_dir=tmp_path / "run", precision="no") -> str:
        with pytest.raises(SystemExit) as stopped, one_line_errors():
            config, _ = CommandLine("").read([*map(str, flags), "--run-dir", str(run_dir)])
            train_plain.main(config, precision)
        assert stopped.value.code == 2
        assert not (tmp_path / "run").exists()
        return one_line(capsys.readouterr().err)

    return mistake


def test_more_samples_than_exist_are_refused(mistake):
    message = "train_samples is 12001, but fashion-mnist-small has 12000 train images\n"
    assert mistake("--train-samples", 12001) == message
    assert "test_samples is 2001" in mistake("--test-samples", 2001)


def test_too_few_images_for_one_batch_are_refused(mistake):
    message = mistake("--batch-size", 300, "--train-samples", 200)
    assert message.startswith("one batch per process needs 300 training images, but there are")


def test_a_resnet_refuses_batches_of_one_image(mistake):
    message = mistake("--model", "resnet18", "--batch-size", 1)
    assert message == "resnet18 needs batches of at least two images, got --batch-size 1\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "tiny_gpt"], "tiny_gpt cannot be trained on fashion-mnist-small. Use --model"),
        (["--dataset", "text"], "small_cnn cannot be trained on text. Use --model tiny_gpt with"),
        ([*TEXT, "--augment"], "--augment changes images, not text. Leave it out.\n"),
        ([*TEXT, "--train-samples", 9999], "train_samples is 9999, but text has 2084 train seq"),
        ([*TEXT, "--batch-size", 9999], "one batch per process needs 9999 training sequences, but"),
    ],
)
def test_text_and_images_are_not_mixed(flags, message, mistake):
    assert mistake(*flags).startswith(message)


def test_training_images_with_test_labels_are_refused(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FASHION_MNIST_SUMS", None)
    for path in data.ASSETS.glob("*.gz"):
        other = path.name.replace("train-labels", "t10k-labels")
        shutil.copy(data.ASSETS / other, tmp_path / path.name)
    message = mistake("--dataset", "fashion-mnist", "--data-dir", tmp_path)
    assert message.startswith("the train-* files in") and "do not belong together" in message


def test_the_error_names_a_missing_data_file(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FASHION_MNIST_SUMS", None)
    for path in data.ASSETS.glob("*-images-*.gz"):
        shutil.copy(path, tmp_path)
    message = mistake("--dataset", "fashion-mnist", "--data-dir", tmp_path)
    assert "train-labels-idx1-ubyte.gz is missing. Pass its folder with --data-dir" in message


def test_an_unwritable_run_folder_is_refused(mistake, tmp_path):
    (tmp_path / "file").write_text("")
    message = mistake(*SHORT, run_dir=tmp_path / "file" / "run")
    assert "Not a directory" in message and "Choose a different --run-dir" in message
    message = mistake(*SHORT, run_dir="/proc/run")  # even root cannot write there
    assert "/proc/run" in message and "Choose a different --run-dir" in message


@pytest.fixture
def existing_run(tmp_path, capsys):
    run = tmp_path / "existing_run"
    config, _ = CommandLine("").read([*SHORT, "--run-dir", str(run)])
    train_plain.main(config)
    capsys.readouterr()
    return run


def test_a_run_with_a_different_config_is_not_overwritten(mistake, existing_run):
    before = {path: path.read_bytes() for path in existing_run.rglob("*") if path.is_file()}
    message = mistake(*SHORT, "--batch-size", 64, run_dir=existing_run)
    assert "contains a run with batch_size 128, not 64. Choose a different --run-dir" in message
    assert before == {path: path.read_bytes() for path in existing_run.rglob("*") if path.is_file()}


def test_a_run_folder_with_a_damaged_config_is_refused(mistake, tmp_path):
    (tmp_path / "held").mkdir()
    for content in ("{", "[]", "{}", '{"model": "alexnet"}', "[" * 10**5):
        (tmp_path / "held" / "config.json").write_text(content)
        message = mistake(*SHORT, run_dir=tmp_path / "held")
        assert "config.json is damaged or from a different version. Choose a different" in message


def test_a_config_with_a_value_of_a_wrong_type_is_refused(existing_run):
    file = existing_run / "config.json"
    choices = json.loads(file.read_text())
    assert load_config(existing_run).batch_size == choices["batch_size"]
    for name, right in choices.items():
        other_type = 5 if isinstance(right, str) else "5"
        for value in (None, [right], {"": right}, other_type, -1, math.nan, 10**400):
            file.write_text(json.dumps(choices | {name: value}))
            with pytest.raises(UserError, match="config.json is damaged or from a different"):
                load_config(existing_run)


def test_a_run_folder_of_an_older_version_is_refused(mistake, existing_run):
    file = existing_run / "environment.json"
    file.write_text(file.read_text().replace('"script"', '"program"'))
    message = mistake(*SHORT, run_dir=existing_run)
    assert "environment.json is damaged or from a different version" in message


def test_fp16_on_a_cpu_is_refused(mistake, monkeypatch):
    monkeypatch.setattr(train_plain, "own_device", lambda: data.torch.device("cpu"))
    assert mistake(*SHORT, precision="fp16").startswith("fp16 needs a GPU")


def test_one_of_two_processes_prints_the_error_and_both_exit(start, tmp_path):
    flags = ["--dataset", "mnist", "--data-dir", tmp_path / "none", "--run-dir", tmp_path / "run"]
    result = start(["python", "accel_demo/train_ddp.py", "--nproc", "2", *flags])
    assert result.returncode == 2
    assert "mnist is not in" in one_line(result.stderr)
    assert not (tmp_path / "run").exists()


def test_under_accelerate_launch_one_of_two_processes_prints_the_error(start, tmp_path):
    """The launcher prints a report, in addition to the error. No process prints a traceback."""
    command = [*launcher("train.py", 2), "--mixed_precision", "fp16", "accel_demo/train.py"]
    result = start([*command, "--run-dir", tmp_path / "run"])
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1
    assert "\nerror: fp16 needs a GPU" in "\n" + result.stderr
    assert 'accel_demo/train.py", line' not in result.stderr
    assert not (tmp_path / "run").exists()


def test_train_py_refuses_an_invalid_flag_when_started_without_a_launcher(start, tmp_path):
    result = start(["python", "accel_demo/train.py", "--epochs", 0, "--run-dir", tmp_path / "run"])
    assert result.returncode == 2
    assert one_line(result.stderr) == "epochs must be at least 1, got 0\n"
    assert not (tmp_path / "run").exists()

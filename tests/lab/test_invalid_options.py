"""Test that the measuring commands refuse invalid options before they start anything."""

import importlib
import multiprocessing.process
import re
import subprocess

import pytest

from accel_demo.errors import UserError

MESSAGES = {
    "crash --kills 0": "--kills must be at least 1, got 0",
    "crash --processes 0": "--processes must be at least 1, got 0",
    "crash --processes 3": "Choose --processes 1 or 2, or --script train_ddp",
    "crash --script train_plain": "argument --script: invalid choice",
    "lr --processes 1": "--processes 1 leaves nothing to compare. Use 1,2.",
    "lr --processes 3": "--processes must divide the batch of 32 images, got 3",
    "lr --samples 1000": "--samples must be a multiple of 512 for 2 processes, got 1000",
    "lr --samples 0": "--samples must be a multiple of 512",
    "lr --samples 1024000": "train_samples is 1024000, but",
    "lr --seeds 0": "--seeds must be from 1 to 1000, got 0",
    "lr --learning-rate 0": "learning_rate must be above 0",
    "lr --learning-rate nan": "learning_rate must be above 0",
    "memory --processes 0": "--processes must be at least 1",
    "memory --processes 1,2": "argument --processes: invalid int value: '1,2'",
    "memory --batch-size 0": "--batch-size must be at least 1 for vgg11, got 0",
    "memory --model resnet18 --batch-size 1": "--batch-size must be at least 2 for resnet18, got 1",
    "memory --optimizer lion": "invalid choice: 'lion'",
    "parity --processes two": "--processes must be like 2 or 1,2,4, got two",
    "parity --steps 0": "--steps must be at least 1, got 0",
    "parity --batch-size 0": "batch_size must be at least 1, got 0",
    "parity --steps 100000": "Use fewer --steps or a smaller --batch-size",
    "parity --model resnet18 --batch-size 1": "needs batches of at least two images",
    "parity --model alexnet": "invalid choice: 'alexnet'",
    "scaling --processes 1,3": "--batch-size 128 cannot be divided among 3 processes",
    "scaling --processes two": "--processes must be like 2 or 1,2,4, got two",
    "scaling --processes 1 --guess 1": "--guess is for 2 processes: include 2 in --processes",
    "scaling --threads 0": "--threads must be at least 1, got 0",
    "scaling --threads 100000": "100000 threads are too many",
    "scaling --repeats 0": "--repeats must be at least 1, got 0",
    "scaling --batch-size 0": "--batch-size must be at least 1, got 0",
    "scaling --batch-size 25002": "--batch-size must be at most 25000 here, got 25002",
    "scaling --model resnet18 --batch-size 2": "needs batches of at least 2 images, got 1",
    "shards --processes 0": "--processes must be at least 1, got 0",
    "shards --samples 0": "--samples must be from 1 to 10000, got 0",
    "shards --samples 10001 --quick": "--samples must be from 1 to 10000, got 10001",
    "shards --batch-size -1": "--batch-size must be from 1 to 10000, got -1",
    "shards --epochs 0": "--epochs must be from 1 to 100, got 0",
    "shards --method DistributedSampler --dispatch-batches": "--dispatch-batches is an option of "
    "Accelerate: DistributedSampler does not have it",
    "shards --split-batches --batch-size 5": "--split-batches splits a batch among 2 processes: "
    "--batch-size must be a multiple of 2, got 5",
    "shards --dispatch-batches --no-even-batches": "--dispatch-batches always makes even batches: "
    "Accelerate ignores even_batches=False there. Remove one of the two flags.",
    "shards --drop-last --samples 7": "--drop-last would drop everything: one batch per process "
    "needs 8 samples, but --samples is 7",
}
COMMANDS = dict.fromkeys(typed.split()[0] for typed in MESSAGES)
for name in [*COMMANDS, "timeline"]:  # tests/core/test_options.py tests the shared options
    MESSAGES[f"{name} --plot x.gif"] = "--plot takes a .png, .svg or .pdf file, got x.gif"
    MESSAGES[f"{name} --json no/x.json"] = "cannot write --json no/x.json: No such file"
    MESSAGES[f"{name} --prosesses 2"] = "unrecognized arguments: --prosesses 2"


@pytest.mark.parametrize(("typed", "message"), MESSAGES.items())
def test_an_invalid_option_is_a_one_line_error_before_anything_starts(
    typed, message, monkeypatch, tmp_path
):
    def started(*_, **__):
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", started)
    monkeypatch.chdir(tmp_path)
    name, *arguments = typed.split()
    command = importlib.import_module(f"accel_demo.lab.{name}.command")
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        command.main(arguments)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []

"""Test that every config field has a flag, and that invalid values raise one-sentence errors."""

import dataclasses
import sys

import pytest

from accel_demo.config import CommandLine, TrainConfig
from accel_demo.errors import UserError


def read(*arguments: str) -> TrainConfig:
    return CommandLine("").read(list(arguments))[0]


def test_without_flags_the_config_has_the_defaults():
    assert read() == TrainConfig()


def test_every_field_is_a_flag():
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            assert getattr(read(flag), field.name) is True
            assert getattr(read("--no" + flag[1:]), field.name) is False
        else:
            value = {int: 7, float: 0.5, str: "elsewhere"}[field.type]
            value = (field.metadata["choices"] or [value])[-1]
            other = {"model": ["--dataset", "text"], "dataset": ["--model", "tiny_gpt"]}
            flags = [flag, str(value), *other.get(field.name, [])]  # these two belong together
            assert getattr(read(*flags), field.name) == value


@pytest.mark.parametrize(("name", "weight_decay"), [("adamw", 0.1), ("adam", 0.0), ("sgd", 5e-4)])
def test_the_default_weight_decay_suits_the_optimizer(name, weight_decay):
    assert read("--optimizer", name).weight_decay == weight_decay
    assert read("--optimizer", name, "--weight-decay", "0.03").weight_decay == 0.03
    assert f"{weight_decay:g} with {name}" in " ".join(CommandLine("").format_help().split())


@pytest.mark.parametrize(
    "flag", [["--local-rank=1"], ["--local_rank", "1"], ["--epochs", "2", "--local_rank=0"]]
)
def test_a_local_rank_flag_is_answered_with_the_command_to_use(flag, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my folder/train.py", *flag])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    command = "`torchrun --nproc-per-node 3 'my folder/train.py'`"
    with pytest.raises(UserError, match=f"^there is no --local-rank. Use {command}, which sets "):
        read(*flag)


def test_a_wrong_flag_that_only_mentions_the_local_rank_is_reported_as_it_is():
    with pytest.raises(UserError, match="^unrecognized arguments: --find-local-rank$"):
        read("--find-local-rank")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "imagenet"], "--dataset: invalid choice: 'imagenet'"),
        (["--model", "alexnet"], "--model: invalid choice: 'alexnet'"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--batch-size", "many"], "--batch-size: invalid int value: 'many'"),
        (["--epochs", "-1"], "epochs must be at least 1, got -1"),
        (["--accumulate", "0"], "accumulate must be at least 1, got 0"),
        (["--learning-rate", "0"], "learning_rate must be above 0, got 0.0"),
        (["--learning-rate", "nan"], "learning_rate must be above 0, got nan"),
        (["--learning-rate", "inf"], "learning_rate must be a finite number"),
        (["--clip-norm", "-1"], "clip_norm must be above 0, got -1.0"),
        (["--dropout", "1"], "dropout must be at least 0 and below 1, got 1.0"),
        (["--num-workers", "-1"], "num_workers must be at least 0, got -1"),
        (["--weight-decay", "nan"], "weight_decay must be at least 0, got nan"),
        (["--weight-decay", "-1"], "weight_decay must be at least 0, got -1.0"),
        (["--schedule", "cosine"], "--schedule: invalid choice: 'cosine'"),
        (["--print-every", "-1"], "print_every must be at least 0, got -1"),
        (["--seed", "4294967296"], "seed must be below 2147483648, got 4294967296"),
        (["--run"], "unrecognized arguments: --run"),
    ],
)
def test_an_invalid_value_is_refused_in_one_sentence(arguments, message):
    with pytest.raises(UserError, match=message):
        read(*arguments)


def test_a_config_that_is_created_in_code_is_validated_too():
    with pytest.raises(UserError, match="model must be one of small_cnn"):
        TrainConfig(model="alexnet")


def test_tracking_without_tensorboard_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        read("--track", "tensorboard")


def test_no_flag_abbreviates_a_flag_of_the_launcher():
    """Launchers accept abbreviated flags: torchrun would read `--run` as `--run-path`."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    launchers = (
        (launch_command_parser(), CommandLine("")),  # train.py
        (get_args_parser(), CommandLine("", precision=True)),  # train_ddp.py
    )
    for launcher, command_line in launchers:
        for flag in set(command_line._option_string_actions) - {"-h", "--help"}:
            assert not [name for name in launcher._option_string_actions if name.startswith(flag)]

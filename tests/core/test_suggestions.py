"""Test that an unknown flag is answered with the flag that was meant, or with none."""

import pytest

from accel_demo.config import CommandLine
from accel_demo.errors import UserError
from accel_demo.lab.audit.command import make_parser as audit_parser
from accel_demo.lab.nodes import command as nodes
from accel_demo.lab.observed.observation import read_command
from accel_demo.lab.scaling.command import make_parser as scaling_parser
from accel_demo.suggestions import SYNONYMS, flag_meant


def error_of(function, *arguments) -> str:
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr 0.1", "--learning-rate"),
        ("--lr=0.1", "--learning-rate"),
        ("-lr 0.1", "--learning-rate"),
        ("--bs 8", "--batch-size"),
        ("--batch_size 8", "--batch-size"),
        ("--batch 8", "--batch-size"),
        ("--epoch 3", "--epochs"),
        ("--dataste mnist", "--dataset"),
        ("--workers 2", "--num-workers"),
        ("--amp", "--mixed-precision"),
        ("--fp16", "--mixed-precision"),
        ("--output-dir out", "--run-dir"),
    ],
)
def test_a_train_file_suggests_the_flag_that_was_meant(typed, meant):
    message = error_of(CommandLine("", precision=True).parse_args, typed.split())
    assert message == f"unrecognized arguments: {typed}; did you mean {meant}?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--bf16", "`accelerate launch --mixed_precision`"),
        ("--gpus 2", "`accelerate launch --num_processes`"),
    ],
)
def test_train_py_names_the_flag_of_the_launcher(typed, meant):
    message = error_of(CommandLine("").parse_args, typed.split())
    assert message == f"unrecognized arguments: {typed}; did you mean {meant}?"


@pytest.mark.parametrize("typed", ["--nonsense", "--foo", "-x", "--step", "word", "--no-cuda"])
def test_nothing_is_suggested_if_no_flag_is_close(typed):
    message = error_of(CommandLine("", precision=True).parse_args, [typed])
    assert message == f"unrecognized arguments: {typed}"


def test_commands_suggest_flags_too():
    message = error_of(scaling_parser().parse_args, ["--gpus", "2"])
    assert message == "unrecognized arguments: --gpus 2; did you mean --processes?"
    message = error_of(read_command, audit_parser(), ["--stpes", "3", "train.py"], "audit")
    assert message == "unrecognized arguments: --stpes 3; did you mean --steps?"
    message = error_of(nodes.read, ["--node", "3"])
    assert message == "unrecognized arguments: --node 3; did you mean --nodes?"


def test_every_synonym_is_a_flag_of_some_program():
    flags = {*CommandLine("", precision=True)._option_string_actions, "--nproc"}
    flags |= {"--global-batch", "--num-processes", "--models"}  # of bench and doctor
    for parser in (scaling_parser(), nodes.make_parser()):
        flags |= {*parser._option_string_actions}
    for word, meant in SYNONYMS.items():
        assert {*meant} & flags and flag_meant(f"--{word}", flags) in meant, word

"""Test that shells accept the script of `accel-demo completion`, and complete with it."""

import subprocess

import pytest
import shtab

from accel_demo.cli import COMMANDS, HELPERS, module_of
from tests.conftest import REPOSITORY, run_to_end

COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_accel_demo "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Map the name of each shell to the file with its script."""
    folder = tmp_path_factory.mktemp("completion")
    files = {}
    for shell in shtab.SUPPORTED_SHELLS:
        result = run_to_end(["accel-demo", "completion", shell])
        assert (result.returncode, result.stderr) == (0, "")
        files[shell] = folder / shell
        files[shell].write_text(result.stdout, encoding="utf-8")
    return files


def output_of(*command) -> str:
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=REPOSITORY)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def completions(script, typed: str) -> list[str]:
    """Return how bash completes `accel-demo` and the words `typed`."""
    words = ["accel-demo", *typed.split()]
    return output_of("bash", "-c", COMPLETE, "bash", script, *words).splitlines()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tim", ["timeline"]),
        ("shards --sam", ["--samples"]),
        ("scaling --model vg", ["vgg11"]),
        ("bench prec", ["precision"]),
        ("bench precision --models ti", ["tiny_cnn"]),
        ("audit pypro", ["pyproject.toml"]),
        ("timeline --output tut", ["tutorials"]),
        ("report pypro", [""]),  # it takes folders
        ("help sca", ["scaling"]),
        ("completion z", ["zsh"]),
        ("--ver", ["--version"]),
    ],
)
def test_bash_completes_commands_flags_choices_and_files(typed, completed, scripts):
    assert completions(scripts["bash"], typed) == completed


def test_every_command_is_completed_with_all_its_flags(scripts):
    for name in COMMANDS | HELPERS:
        flags = {"--help"}
        if name in COMMANDS and name != "bench":
            flags |= {*module_of(name).make_parser()._option_string_actions}
        assert flags <= {*completions(scripts["bash"], f"{name} -")}


@pytest.mark.system
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_has_no_syntax_errors(shell, scripts):
    output_of(shell, "-n", scripts[shell])

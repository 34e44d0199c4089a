"""Print a script with which your shell completes commands, options and files when you press Tab.

accel-demo completion bash > ~/.accel-demo.bash && echo 'source ~/.accel-demo.bash' >> ~/.bashrc
accel-demo completion zsh > ~/.accel-demo.zsh && echo 'source ~/.accel-demo.zsh' >> ~/.zshrc

A new shell then completes them. In ~/.zshrc, the line must come after `compinit`.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import shtab

from accel_demo.options import Parser

FOLDERS = {"RUN", "FOLDER"}  # what the help text calls a path to a folder


def main(
    arguments: list[str], questions: Mapping[str, str], module_of: Callable[[str], ModuleType]
) -> int:
    """Print the script. `questions` maps each command to its help text."""
    shell = make_parser().parse_args(arguments).shell
    root = argparse.ArgumentParser("accel-demo")
    root.add_argument("--version", action="store_true", help="show the version and exit")
    commands = root.add_subparsers()
    for name, question in questions.items():
        if name == "help":
            commands.add_parser(name, help=question).add_argument("about", choices=[*questions])
        elif name == "completion":
            add(commands, name, question, make_parser())
        elif name == "bench":
            benchmarks = commands.add_parser(name, help=question).add_subparsers()
            for benchmark, parser in module_of(name).parsers().items():
                add(benchmarks, benchmark, parser.description, parser)
        else:
            add(commands, name, question, module_of(name).make_parser())
    print(shtab.complete(root, shell))
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo completion")
    choices = shtab.SUPPORTED_SHELLS
    parser.add_argument("shell", choices=choices, metavar="SHELL", help=", ".join(choices))
    return parser


def add(parsers, name: str, help: str, parser: Parser) -> None:
    """Add the parser of a command to those of all commands, and say which options are paths.

    A command without positional arguments completes files, because many take a script.
    """
    added = parsers.add_parser(name, help=help, parents=[parser], add_help=False)
    if all(action.option_strings for action in parser._actions):
        added.add_argument("script", nargs="*", type=Path)
    for action in added._actions:
        if action.type is Path:
            action.complete = shtab.DIRECTORY if action.metavar in FOLDERS else shtab.FILE

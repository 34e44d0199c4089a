"""Run `accel-demo COMMAND`: import the command's module in accel_demo/lab/ and call its `main`."""

import importlib
import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable
from functools import partial
from types import ModuleType

from accel_demo import __version__
from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab import load
from accel_demo.options import Parser
from accel_demo.suggestions import did_you_mean

COMMANDS = {  # the question that each command answers
    "audit": "What is wrong with my training script?",
    "explain": "What does this error message mean?",
    "doctor": "What hardware do I have, and does my launch config start the processes it promises?",
    "shards": "Which process reads which sample in each epoch?",
    "lr": "How do the learning rate and the loss change with more processes?",
    "parity": "Do one process and several train alike? And all four versions of the loop?",
    "timeline": "Where does each process spend its time in a training step?",
    "scaling": "How much faster is training with more processes, and what limits the speed-up?",
    "memory": "What uses the memory during training?",
    "nodes": "How does my launch behave on several machines? (simulated on this one)",
    "crash": "Does a training run that is killed repeatedly end with the same weights?",
    "report": "What are the results of my runs, and how do the runs differ?",
    "predict": "What does my trained model predict for some test images?",
    "bench": "How fast are the methods from the course on this machine?",
    "init": "How do I get my own copy of the course?",
    "next": "What should I read or do now?",
    "check": "Is my answer to an exercise correct?",
    "hint": "I'm stuck on an exercise. What now?",
    "reset": "How do I start an exercise again?",
    "answer": "What is a right answer to an exercise?",
}
SINGLE_MODULES = set("predict init next check hint reset answer".split())  # others are folders
HELPERS = {  # commands about the commands; they have no module in lab/
    "help": "What are the options of a command? For example: accel-demo help audit",
    "completion": "How does my shell complete commands and options when I press Tab?",
}
LIST = "accel-demo --help lists the commands"


def main() -> None:
    """Run the command that the user typed, and exit with the code that its `main` returns."""
    with one_line_errors():
        words = sys.argv[1:] or ["--help"]
        while words[0] == "help":
            words = [*words[1:], "--help"]
        command, *arguments = words
        make_parser().parse_args([command])
        if command not in COMMANDS | HELPERS:
            nearest = did_you_mean(command, COMMANDS | HELPERS)
            advice = f"did you mean accel-demo {nearest}?" if nearest else LIST
            raise UserError(f"there is no command {command or repr('')}; {advice}")
        load.begin()
        code = 1
        try:
            code = main_of(command)(arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
            # https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(code)


def make_parser() -> Parser:
    """Return the parser of the first word, which is a command, --help or --version."""
    width = max(map(len, COMMANDS | HELPERS)) + 2
    lines = "\n".join(f"  {name:{width}}{text}" for name, text in (COMMANDS | HELPERS).items())
    parser = Parser(
        f"Distributed data-parallel training, taken apart.\n\ncommands:\n{lines}",
        prog="accel-demo",
        usage="accel-demo COMMAND [OPTIONS]",
        epilog="Run accel-demo COMMAND --help for the command's options and examples.",
    )
    parser.add_argument("command", nargs="?", help=SUPPRESS)
    parser.add_argument("--version", action="version", version=f"accel-demo {__version__}")
    return parser


def main_of(command: str) -> Callable[[list[str]], int]:
    """Return the function that runs a command."""
    if command == "completion":
        from accel_demo import completion

        return partial(completion.main, questions=COMMANDS | HELPERS, module_of=module_of)
    return module_of(command).main


def module_of(command: str) -> ModuleType:
    """Import the module of a command. It defines `make_parser` and `main`."""
    name = command if command in SINGLE_MODULES else f"{command}.command"
    return importlib.import_module(f"accel_demo.lab.{name}")

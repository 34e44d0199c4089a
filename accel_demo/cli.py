"""Run `accel-demo COMMAND`: import the command from accel_demo/lab/, and call its `main`."""

import gc
import importlib
import os
import sys
from argparse import SUPPRESS
from difflib import get_close_matches

from accel_demo.errors import Parser, UserError, one_line_errors

COMMANDS = {  # the question that each command answers
    "doctor": "What does this machine have, and does my launch config start what it says?",
    "shards": "Which process reads which sample in each epoch?",
    "lr": "How do more processes change my learning rate and loss?",
    "parity": "Do all four versions of the loop end with equal weights?",
    "timeline": "Where does the time of a training step go, on every process?",
    "scaling": "What do I gain with more processes, and why not more?",
    "memory": "Where does the memory of a training go?",
    "crash": "Does a training run end with the same weights if it is killed again and again?",
    "report": "How did my runs go, and how do they differ?",
    "predict": "What does my trained model predict for some test images?",
    "bench": "How fast is what the course compares, on this machine?",
    "check": "Is my answer to an exercise right?",
}
SINGLE_MODULES = {"predict", "check"}  # the others have a command.py


def main() -> None:
    """Parse the name of the command, and exit with the code that its `main` returns."""
    with one_line_errors():
        width = max(map(len, COMMANDS)) + 2
        questions = "\n".join(f"  {name:{width}}{text}" for name, text in COMMANDS.items())
        parser = Parser(
            f"Distributed data-parallel training, taken apart.\n\ncommands:\n{questions}",
            prog="accel-demo",
            usage="accel-demo COMMAND [OPTIONS]",
            epilog="accel-demo COMMAND --help shows its options, and two examples.",
        )
        parser.add_argument("command", nargs="?", metavar="COMMAND", help=SUPPRESS)
        command = parser.parse_args(sys.argv[1:2]).command
        if command is None:
            parser.print_help()
            sys.exit(0)
        if command not in COMMANDS:
            nearest = get_close_matches(command, COMMANDS, n=1, cutoff=0)[0]
            raise UserError(f"there is no command {command}; did you mean accel-demo {nearest}?")
        gc.disable()  # importing torch takes a quarter longer with garbage collection
        try:
            name = command if command in SINGLE_MODULES else f"{command}.command"
            module = importlib.import_module(f"accel_demo.lab.{name}")
        finally:
            gc.enable()
        try:
            code = module.main(sys.argv[2:])
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
            # https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        sys.exit(code)


if __name__ == "__main__":
    main()

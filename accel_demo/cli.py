"""Run `accel-demo COMMAND`: import the command's module in accel_demo/lab/ and call its `main`."""

import gc
import importlib
import os
import sys
from argparse import SUPPRESS
from difflib import get_close_matches

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab import load
from accel_demo.options import Parser

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
    "init": "How do I get the course into a folder of mine?",
    "next": "What should I read or do now?",
    "check": "Is my answer to an exercise correct?",
    "hint": "How do I go on with an exercise?",
    "reset": "How do I start an exercise again?",
    "answer": "What would a right answer have been?",
}
SINGLE_MODULES = {
    "predict",
    "init",
    "next",
    "check",
    "hint",
    "reset",
    "answer",
}  # others are folders


def main() -> None:
    """Run the command that the user typed, and exit with the code that its `main` returns."""
    with one_line_errors():
        width = max(map(len, COMMANDS)) + 2
        questions = "\n".join(f"  {name:{width}}{text}" for name, text in COMMANDS.items())
        parser = Parser(
            f"Distributed data-parallel training, taken apart.\n\ncommands:\n{questions}",
            prog="accel-demo",
            usage="accel-demo COMMAND [OPTIONS]",
            epilog="Run accel-demo COMMAND --help for the command's options and two examples.",
        )
        parser.add_argument("command", nargs="?", metavar="COMMAND", help=SUPPRESS)
        command = parser.parse_args(sys.argv[1:2]).command
        if command is None:
            parser.print_help()
            sys.exit(0)
        if command not in COMMANDS:
            nearest = get_close_matches(command, COMMANDS, n=1, cutoff=0)[0]
            raise UserError(f"there is no command {command}; did you mean accel-demo {nearest}?")
        load.begin()
        gc.disable()  # garbage collection makes importing torch a quarter slower
        try:
            name = command if command in SINGLE_MODULES else f"{command}.command"
            module = importlib.import_module(f"accel_demo.lab.{name}")
        finally:
            gc.enable()
        code = 1
        try:
            code = module.main(sys.argv[2:])
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
            # https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(code)


if __name__ == "__main__":
    main()

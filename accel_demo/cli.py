"""accel-demo VERB: find the command in accel_demo/lab/, import it and run it."""

import gc
import importlib
import os
import sys

from accel_demo.errors import Parser, one_line_errors

VERBS = {
    "doctor": "what this machine has, and whether a launch config starts what it says",
    "predict": "show what a trained model says of some test images",
    "parity": "train a few steps in every telling and compare the weights",
    "shards": "show which process reads which sample in each epoch",
    "timeline": "show where the time of a training step goes, on every process",
    "scaling": "measure what more processes gain, and why not more",
    "lr": "show what becomes of a schedule on one process and on two",
    "memory": "show where a training's memory goes, by formula and measured",
    "report": "make one page of one or more runs: curves, final figures, mistakes",
    "bench": "measure on this machine what the course says about speed",
    "crash": "kill a training again and again, and see whether it ends with the same weights",
    "check": "check an exercise of the tutorials",
}

SINGLE_MODULES = {"predict", "check"}  # the other verbs are folders with a command.py


def main() -> None:
    """The console script. A verb's module has `main(arguments)`, which gives the exit code."""
    with one_line_errors():
        verbs = "\n".join(f"  {verb:10}{text}" for verb, text in VERBS.items())
        parser = Parser(
            f"Distributed data-parallel training, taken apart.\n\nverbs:\n{verbs}",
            prog="accel-demo",
            epilog="accel-demo VERB --help tells more of one.",
        )
        parser.add_argument("verb", choices=VERBS, metavar="VERB")
        verb = parser.parse_args(sys.argv[1:2]).verb
        gc.disable()  # most verbs import torch: collecting garbage is a quarter of it, for nothing
        try:
            name = verb if verb in SINGLE_MODULES else f"{verb}.command"
            module = importlib.import_module(f"accel_demo.lab.{name}")
        finally:
            gc.enable()
        try:
            code = module.main(sys.argv[2:])
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough, as `| head` has
            # https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        sys.exit(code)


if __name__ == "__main__":
    main()

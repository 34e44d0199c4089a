"""A user's mistake: one line that says what to do, exit code 2, from one process only."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

PATIENCE = 20  # seconds a process leaves to rank 0 to say what is wrong


class UserError(Exception):
    """What was asked for cannot be done; the message says what to do instead."""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose error is one line instead of a page of usage.

    It knows no abbreviations: a launcher's own parser would take some of them for its own.
    """

    def __init__(self, description: str | None, **options):
        formatter = argparse.RawDescriptionHelpFormatter
        description = (description or "").strip()
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=formatter, **options
        )

    def error(self, message: str):
        raise UserError(message)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2. Any other error is our bug.

    Every process of a run finds the same mistake at the same place, and rank 0 speaks. The others
    wait, because a launcher stops all of them as soon as the first one exits. One that nobody has
    stopped by then knows something the others do not (its disk is full, say), and speaks too.
    """
    try:
        yield
    except UserError as error:
        _give_up(str(error))
    except KeyboardInterrupt:  # before the run listens to signals, or once it has ended
        say("stopped")
        sys.exit(130)


def _give_up(message: str) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no step is left to finish
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE)
    say(f"error: {message}")
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
    sys.exit(2)


def say(line: str) -> None:
    """A line of its own on stderr: a progress bar that stands there is taken away first."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(getattr(tqdm and tqdm.tqdm, "_instances", ())):
        bar.close()
    print(line, file=sys.stderr, flush=True)

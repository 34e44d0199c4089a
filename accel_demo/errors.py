"""Report a user's mistake in one line, from one process only, with exit code 2."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

PATIENCE = 20  # seconds for which the other ranks let rank 0 report the error


class UserError(Exception):
    """A mistake of the user. The message says what to do instead."""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that reports an error in one line, without the usage text.

    Flags cannot be abbreviated, because a launcher would take some abbreviations as its own flags.
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

    Usually every process of a run raises the same error, and rank 0 prints it. The other processes
    wait, because a launcher stops all of them as soon as the first one exits. If a process is still
    running after `PATIENCE`, the error was its own (its disk is full, for example), so it prints
    the error, too.
    """
    try:
        yield
    except UserError as error:
        _give_up(str(error))
    except KeyboardInterrupt:  # before the run handles signals, or after it has ended
        say("stopped")
        sys.exit(130)


def _give_up(message: str) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step to finish
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE)
    say(f"error: {message}")
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
    sys.exit(2)


def say(line: str) -> None:
    """Print a line on stderr. Close the progress bar first, if there is one on the line."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(getattr(tqdm and tqdm.tqdm, "_instances", ())):
        bar.close()
    print(line, file=sys.stderr, flush=True)

"""Report a user's mistake in one line per machine, and exit with code 2."""

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from accel_demo.missing_characters import replace_missing_characters
from accel_demo.terminal import columns, fitted

REPORT_TIMEOUT = 20  # seconds that the other ranks wait for local rank 0 to report the error


class UserError(Exception):
    """An error caused by the user. The message should explain what to do instead."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a `UserError` as one line on stderr, and exit with code 2. Other errors pass through.

    Usually every process raises the same error, and only the first process on each machine (local
    rank 0) prints it. The others wait until this process exits and the launcher stops them. If a
    rank is still running after `REPORT_TIMEOUT` seconds, only this rank had the error (for example,
    its disk is full), so it prints the error.

    Every program of ours begins with this function, so it also calls `replace_missing_characters`.
    """
    replace_missing_characters()
    try:
        yield
    except UserError as error:
        _give_up(str(error))
    except KeyboardInterrupt:  # during training, StopSignals handles Ctrl-C instead
        say("stopped")
        sys.exit(130)


def _give_up(message: str) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # exit on SIGTERM: there is no step to finish
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        time.sleep(REPORT_TIMEOUT)
    say(f"error: {message}")
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
    sys.exit(2)


def say(line: str) -> None:
    """Print a line to stderr, wrapped on a terminal. First, close any progress bar on this line."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(getattr(tqdm and tqdm.tqdm, "_instances", ())):
        bar.close()
    with output_may_be_closed():
        print(fitted(line, columns(sys.stderr)), file=sys.stderr, flush=True)


@contextmanager
def output_may_be_closed() -> Iterator[None]:
    """Discard the output if its terminal or pipe has been closed.

    A training run does not fail because nobody can read what it prints.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise

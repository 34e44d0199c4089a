"""Run a function whose output goes to a terminal."""

import os
import pty
import sys
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest


def shown_on_terminal(function: Callable[[], object], columns: int) -> str:
    """Call `function`, and return what it prints to a terminal with this many columns."""
    terminal, program = pty.openpty()
    termios.tcsetwinsize(program, (24, columns))  # for tqdm, which does not read COLUMNS
    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(1) as executor,
        os.fdopen(terminal, "rb") as screen,
    ):
        output = executor.submit(read_to_end, screen)
        with os.fdopen(program, "w", encoding="utf-8") as stream:
            patch.setenv("COLUMNS", str(columns))
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            function()
        return output.result().decode().replace("\r\n", "\n")


def read_to_end(screen) -> bytes:
    """Read until no program has the terminal open. Linux reports that as an error."""
    content = bytearray()
    with suppress(OSError):
        while part := os.read(screen.fileno(), 65536):
            content += part
    return bytes(content)

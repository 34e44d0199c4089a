"""Print our text on terminals that cannot show all of its characters."""

import codecs
import sys
from contextlib import suppress
from io import TextIOWrapper

LOOK_ALIKES = {
    "×": "x",
    "…": "...",
    "–": "-",
    "−": "-",
    "·": "-",
    "→": "->",
    "←": "<-",
    "↓": "v",
    "√": "sqrt ",
    "≠": "!=",
    "µ": "u",
}


def replace_missing_characters() -> None:
    """Print a similar character, or "?", instead of one that stdout or stderr cannot encode.

    Without this, Python raises `UnicodeEncodeError`, for example with LC_ALL=C.
    """
    codecs.register_error("look-alikes", _look_alikes)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a notebook has a different kind of stream
            with suppress(OSError):  # its file was replaced by a pipe (os.dup2)
                stream.reconfigure(errors="look-alikes")


def _look_alikes(error: UnicodeError) -> tuple[str, int]:
    """Handle an error as https://docs.python.org/3/library/codecs.html#error-handlers explains."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(LOOK_ALIKES.get(character, "?") for character in missing), error.end

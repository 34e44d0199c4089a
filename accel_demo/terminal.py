"""Fit printed text to the width of the terminal. Text in a pipe or a file stays as it is."""

import re
import shutil
import sys
import textwrap
from typing import TextIO

PROGRAMS = r"(?:accel-demo|accelerate|python|torchrun) "
COMMAND = re.compile(PROGRAMS)
# What stays on one line, so that it can be copied: inline code, and a command at the end of a line
CODE = re.compile(rf"`[^`]*`|(?:^|(?<=: )){PROGRAMS}.*")
# What stands before the text of a line, if its other lines are to begin below the text: the mark of
# an item in a list, or the first of two columns
BESIDE = re.compile(r" *(?:-+ |\(\d+\) |\S+(?: \S+)* {2,})")
LABEL = re.compile(r" *[\w -]{1,24}: ")  # such as "  cure: "
CODE_INDENT = "      "  # lines of code in our output begin with at least this


def columns(stream: TextIO | None) -> int | None:
    """Return the width of the terminal that a stream writes to, or None if it is not a terminal.

    The width is at least 20.
    """
    if stream is None or not stream.isatty():
        return None
    return max(20, shutil.get_terminal_size().columns)  # textwrap needs some room


def narrower_terminal(text: str) -> int | None:
    """Return the width of the terminal if stdout is one and the text is too wide for it."""
    width = columns(sys.stdout)
    widest = max(map(len, text.split("\n")))
    return width if width and width < widest else None


def display(text: str = "") -> None:
    """Print text. On a terminal, wrap the lines that are too long for it."""
    print(fitted(text, columns(sys.stdout)), flush=True)


def fitted(text: str, width: int | None) -> str:
    """Wrap the lines that are wider than `width`, except code. If `width` is None, wrap none."""
    if width is None:
        return text
    return "\n".join(_wrapped(line, width) for line in text.split("\n"))


def fill(text: str, most: int, break_on_hyphens: bool = True, indent: str = "") -> str:
    """Wrap a paragraph at `most` characters, or earlier if a terminal has fewer columns.

    All lines but the first are indented. There is room left for the asterisks around a finding.
    """
    width = columns(sys.stdout)
    most = min(most, width - 4) if width else most
    return textwrap.fill(text, most, subsequent_indent=indent, break_on_hyphens=break_on_hyphens)


def reflowed(text: str) -> str:
    """Wrap paragraphs again that were wrapped for another width, if the terminal is narrower.

    Indented lines and example commands stay on lines of their own.
    """
    width = narrower_terminal(text)
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        if lines and _is_prose(line) and _is_prose(lines[-1]):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(_wrapped_help(line, width) for line in lines)


def _is_prose(line: str) -> bool:
    return bool(line) and not line.startswith((" ", "- ")) and not COMMAND.match(line)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width or line.startswith(CODE_INDENT):
        return line
    indent = len(line) - len(line.lstrip())
    if beside := BESIDE.match(line):
        indent = beside.end()
    elif LABEL.match(line):
        indent += 2
    return wrap_words(line, width, " " * min(indent, width // 2))


def _wrapped_help(line: str, width: int) -> str:
    """Wrap a line of the help text: a whole paragraph, an entry of a list, or an example.

    The command of an example continues after a backslash, and its comment goes below it.
    """
    if len(line) <= width:
        return line
    if not COMMAND.match(line):
        return wrap_words(line, width, "") if _is_prose(line) else _wrapped(line, width)
    command, _, comment = line.partition("  # ")
    text = wrap_words(command.rstrip(), width - 2, "    ", keep=None).replace("\n", " \\\n")
    return f"{text}\n{wrap_words(f'    # {comment}', width, '    # ')}" if comment else text


def wrap_words(text: str, width: int, indent: str, keep: re.Pattern | None = CODE) -> str:
    """Wrap text between words, but not inside what `keep` matches. Indent all lines but the first.

    A line is wider than `width` if there is no place to wrap it.
    """
    if keep:
        text = keep.sub(lambda match: match[0].replace(" ", "\0"), text)
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace("\0", " ")

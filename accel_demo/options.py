"""Read command lines: our parser, the options that several programs share, and their checks."""

import argparse
import importlib.util
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from accel_demo.errors import UserError
from accel_demo.suggestions import flag_meant
from accel_demo.terminal import narrower_terminal, reflowed, wrap_words

OPTION = re.compile(r"\[[^]]*\]")  # in the usage text


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description as they are, unless a terminal is too narrow for them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(reflowed(text), width, indent)

    def _format_usage(self, usage, actions, groups, prefix) -> str:
        text = super()._format_usage(usage, actions, groups, prefix)
        if narrow := narrower_terminal(text):  # argparse has put an option far to the right
            text = wrap_words(" ".join(text.split()), narrow, " " * 8, OPTION) + "\n\n"
        return text


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that reports an error in one line, without the usage text.

    Flags cannot be abbreviated, because a launcher would read some abbreviations as its own flags.
    """

    def __init__(
        self,
        description: str | None,
        *,
        plot: bool = False,
        processes: int | None = None,
        least: int = 1,
        **settings,
    ):
        """Add `--plot` if `plot` is true, and `--processes` if its default `processes` is given.

        `least` is the smallest number of processes.
        """
        description = (description or "").strip()
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=HelpFormatter, **settings
        )
        self.quick_defaults: dict[str, tuple] = {}  # {option: default without and with --quick}
        self.processes: tuple[int, int] | None = None  # default and minimum of --processes N
        self.flags_of_launcher: dict[str, str] = {}  # {flag to suggest: how the launcher calls it}
        self.subjects: dict[str, list[str]] = {}  # {subject: flags that are only about it}
        self.group: Any = None  # the group of the help text that options are added to
        if processes is not None:
            self.add_processes(processes, "how many processes to start", least)
        if plot:
            self.add_plot()

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with this message. If a flag does not exist, suggest a similar one."""
        kind, _, words = message.partition("unrecognized arguments: ")
        unknown = next((word for word in words.split() if word.startswith("-")), None)
        if not kind and unknown:
            flags = [*self._option_string_actions, *self.flags_of_launcher]
            if meant := flag_meant(unknown, flags):
                message += f"; did you mean {self.flags_of_launcher.get(meant, meant)}?"
        raise UserError(message)

    def parse_args(self, args=None, namespace=None) -> Any:
        """Return the options. `args` defaults to `sys.argv[1:]`.

        Raises `UserError` if an option is invalid, or if an output file cannot be written.
        """
        options: Any = super().parse_args(args, namespace)
        self.set_quick_defaults(options)
        if self.processes:
            options.processes = _processes_of_program(options.processes, *self.processes)
        check_outputs(options)
        return options

    def set_quick_defaults(self, options) -> None:
        """Give each option that was not typed its default without or with `--quick`."""
        for name, (full, quick) in self.quick_defaults.items():
            if getattr(options, name) is None:
                setattr(options, name, quick if options.quick else full)

    def begin_group(self, subject: str) -> None:
        """Put all options that are added from now on under a heading: they are about `subject`."""
        self.group = self.add_argument_group(f"only for {subject}")
        self.subjects[subject] = []

    def add_argument(self, *flags, **settings) -> argparse.Action:
        """Add an argument to the current group, if there is one."""
        if not getattr(self, "group", None):
            return super().add_argument(*flags, **settings)
        [*self.subjects.values()][-1].extend(flags)
        return self.group.add_argument(*flags, **settings)

    def add_option(
        self,
        flag: str,
        default,
        help: str,
        *,
        quick=None,
        least: int | None = None,
        most: int | None = None,
        **settings,
    ) -> None:
        """Add an option with a default, which may be different with `--quick`.

        The help text shows the defaults. An integer below `least` or above `most` is refused.
        """
        with_quick = "" if quick is None else f", or {quick} with --quick"
        help += f" (default: {default}{with_quick})"
        if isinstance(default, int):
            settings = {"type": _integer(flag, least, most), "metavar": "N", **settings}
        else:
            settings = {"type": type(default), **settings}
        first = default if quick is None else None
        action = self.add_argument(flag, default=first, help=help, **settings)
        if quick is not None:
            self.quick_defaults[action.dest] = (default, quick)

    def add_quick(self, help: str, seconds: int = 20) -> None:
        """Add `--quick`, with which the program takes at most `seconds` seconds on two idle cores.

        `help` says what it leaves out.
        """
        help += f"; takes at most about {seconds} s"
        self.add_argument("--quick", action="store_true", help=help)

    def add_json(self) -> None:
        """Add `--json FILE`."""
        self.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")

    def add_plot(self, help: str = "draw the results to FILE (.png, .svg or .pdf)") -> None:
        """Add `--plot FILE`."""
        self.add_argument("--plot", type=Path, metavar="FILE", help=help)

    def add_processes(self, default: int, help: str, least: int = 1) -> None:
        """Add `--processes N`. Under a launcher, the value is the number of processes it started.

        The flag itself is refused under a launcher, and so is a value below `least`.
        """
        help += f" (default: {default})"
        self.add_argument("--processes", type=int, metavar="N", help=help)
        self.processes = default, least

    def add_process_counts(self, help: str) -> None:
        """Add `--processes N,N`. The value is a sorted list without duplicates."""
        help += " (default: 1,2)"
        self.add_argument(
            "--processes", type=_process_counts, default="1,2", metavar="N,N", help=help
        )

    def add_guess(self, meaning: str) -> None:
        """Add `--guess VALUE`. `meaning` says which number to guess, and its unit."""
        help = f"your guess, compared with the result: {meaning}"
        self.add_argument("--guess", type=_guess, metavar="VALUE", help=help)


def command_parser(command: str, description: str | None, quick: str, seconds: int = 20) -> Parser:
    """Return a parser for `accel-demo COMMAND` with `--quick`, `--json` and `--plot`.

    `quick` and `seconds` are explained in `Parser.add_quick`.
    """
    parser = Parser(description, prog=f"accel-demo {command}")
    parser.add_quick(quick, seconds)
    parser.add_json()
    parser.add_plot()
    return parser


def check_outputs(options) -> None:
    """Raise `UserError` if a file given by `--json`, `--html` or `--plot` cannot be written."""
    for name in ("json", "html", "plot"):
        flag, path = f"--{name}", getattr(options, name, None)
        if path is None:
            continue
        try:
            existed = path.exists()
            path.open("ab").close()
            if not existed:
                path.unlink(missing_ok=True)  # another rank may check it, too
        except OSError as error:
            raise UserError(f"cannot write {flag} {path}: {error.strerror}") from None
    plot = getattr(options, "plot", None)
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib. Run `pip install matplotlib`.")
    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot takes a .png, .svg or .pdf file, got {plot}")


def _processes_of_program(given: int | None, default: int, least: int) -> int:
    """Return the number of processes of this launch, or the number to start without a launcher."""
    launched = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if launched is None:
        return _check_processes(default if given is None else given, least)
    if given is not None:
        raise UserError("--processes cannot be used with a launcher. Leave it out.")
    if not launched.isdigit():
        raise UserError(f"WORLD_SIZE must be an integer, got {launched!r}. Change it, or unset it.")
    return _at_least(least, "--processes", int(launched))


def _process_counts(text: str) -> list[int]:
    """Parse process counts such as "1,2,4" into a sorted list without duplicates.

    Raises `UserError` if the text is not a list of integers, or if a count is out of range.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--processes must be like 2 or 1,2,4, got {text}") from None
    for count in counts:
        _check_processes(count)
    return sorted(set(counts))


def _check_processes(count: int, least: int = 1) -> int:
    if count > 8 * (os.cpu_count() or 1):
        raise UserError(f"{count} processes are too many for {os.cpu_count()} cores")
    return _at_least(least, "--processes", count)


def _at_least(least: int, flag: str, number: int) -> int:
    if number < least:
        raise UserError(f"{flag} must be at least {least}, got {number}")
    return number


def _integer(flag: str, least: int | None, most: int | None) -> Callable[[str], int]:
    """Return a function that converts the value of an option, for the parameter `type`."""

    def convert(text: str) -> int:
        number = int(text)
        if most is not None and least is not None and not least <= number <= most:
            raise UserError(f"{flag} must be from {least} to {most}, got {number}")
        return number if least is None else _at_least(least, flag, number)

    convert.__name__ = "int"  # argparse shows it if the text is not an integer
    return convert


def _guess(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"--guess must be a number, got {text}")
    return number

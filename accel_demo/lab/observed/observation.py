"""Start the reader's command under observation, and collect what was seen of it."""

import os
import re
import shlex
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_demo.errors import UserError, say
from accel_demo.lab.observed import launches
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.keeper import clean_up
from accel_demo.lab.observed.observed_command import ObservedCommand
from accel_demo.lab.observed.places import NotChecked, last_lines, short_path, text_of
from accel_demo.lab.observed.ranks import Rank, read_launches
from accel_demo.options import Parser, check_outputs
from accel_demo.wording import counted

# In the message or the line of an error: the script cannot run without a GPU
NEEDS_GPU = re.compile(r"\bcuda|nccl|nvidia|\bgpus?\b", re.IGNORECASE)
NEEDS_LAUNCHER = re.compile(r"\bvariable \w+ expected|'(LOCAL_)?(RANK|WORLD_SIZE)'")
YOURS = "your script"  # the subject of options, see `Parser.begin_group`
NO_DRIVER = "Found no NVIDIA driver"
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S*")  # names and paths, which may contain "gpu"


@dataclass
class Observation:
    """What was seen of a command. `ended` is the result of the keeper, `waits` lines to print.

    `content` is what the `read` of `observe` has returned.
    """

    evidence: Evidence
    command: list[str]
    ended: dict
    waits: list[str]
    content: Any = None


def observe(
    options,
    name: str,
    limits: dict[str, str],
    read: Callable[[Evidence], Any] = lambda evidence: None,
) -> Observation:
    """Run `options.command` to its end, or to its `limits`, which are environment variables.

    `name` is the command that observes it. `read` is called while the files of the observer exist.
    Raises `UserError` if it starts no process that trains, or needs a GPU.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"accel-demo-{name}-"))
    except OSError as error:
        raise UserError(f"cannot create a temporary folder ({error.strerror})") from None
    command = launches.command_for(options.command, options.processes)
    plan = {
        "command": command,
        "environment": launches.environment_for(folder, options.gpu, limits),
        "folder": str(Path.cwd()),
        "log": str(folder / "output.txt"),
        "keep": options.keep,
        "outputs": own_outputs(),
    }
    say(f"running: {shlex.join(command)}")
    say(f"its output: {plan['log']}")
    if launches.has_gpus() and not options.gpu:
        say("its GPUs are hidden, and ACCELERATE_USE_CPU=true is set (see --gpu)")
    observed = ObservedCommand(folder, plan, options.timeout)
    try:
        ended = observed.run()
        if ended["error"]:
            raise UserError(ended["error"])
        waits = observed.waits
        ranks, *others = read_launches(folder, observed.hang) or [[]]
        log = Path(plan["log"]).read_bytes()[-20_000:].decode(errors="replace")
        evidence = Evidence(ranks, ended["code"], log, observed.hang, observed.out_of_time)
        evidence.other_launches = others
        evidence.unwritten = ended["unwritten"]
        evidence.seconds_to_notice = observed.seconds_to_notice
        check_usable(evidence, plan["log"], options.gpu, name)
        content = read(evidence)
    except BaseException:
        for path, reason in observed.not_restored.items():
            say(f"not put back: {short_path(path)} ({reason})")
        raise
    finally:
        clean_up(folder)
    return Observation(evidence, command, ended, waits, content)


def add_processes(parser: Parser) -> None:
    """Add `--processes N` for a command that starts the reader's script."""
    help = "processes to start for a Python script (default: 2 for a SCRIPT)"
    parser.add_argument("-n", "--processes", type=int, metavar="N", help=help)


def add_options(parser: Parser) -> None:
    """Add the other options of each command that starts the reader's script."""
    help = "stop after S seconds (default: 600)"
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help=help)
    parser.add_argument("--gpu", action="store_true", help="do not hide the GPUs")
    help = "do not put files back that the script has changed"
    parser.add_argument("--keep", action="store_true", help=help)


def read_command(parser: Parser, arguments: list[str], name: str):
    """Parse and check the options, and the command after them, which becomes `options.command`.

    Raises `UserError` if an option or the command is invalid.
    """
    own, command = arguments, []
    scripts = [n for n, word in enumerate(arguments) if word.endswith(".py")]
    if "--" in arguments[: min(scripts, default=None)]:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    elif scripts:  # all words after the script belong to it
        own, command = arguments[: scripts[0]], arguments[scripts[0] :]
    options, rest = parser.parse_known_args(own)
    parser.set_quick_defaults(options)
    if rest and rest[0].startswith("-"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        words = " ".join([*rest, *command])
        raise UserError(f"put -- before a command: accel-demo {name} -- {words}")
    if not command:
        raise UserError(f"which script? For example: accel-demo {name} train.py")
    if not 0 < options.timeout <= 86_400:
        raise UserError(f"--timeout must be above 0 and at most 86400, got {options.timeout:g}")
    if options.processes is not None and not 1 <= options.processes <= 16:
        raise UserError(f"--processes must be from 1 to 16, got {options.processes}")
    options.command = command
    check_outputs(options)
    launches.check_program(command)
    launches.command_for(command, options.processes)
    return options


def is_about_a_script(arguments: list[str]) -> bool:
    """Return True if a command that also measures our own code is to measure the reader's."""
    return "--" in arguments or any(word.endswith(".py") for word in arguments)


def refuse_options(parser: Parser, words: list[str], subject: str) -> None:
    """Raise `UserError` if one of the words is an option that is only about `subject`."""
    typed = {word.split("=")[0] for word in words}
    for flag in parser.subjects[subject]:
        if flag in typed:
            advice = "put -- and its command at the end"
            if subject != YOURS:
                advice = "leave it out, or the command"
            raise UserError(f"{flag} is only for {subject}: {advice}")


def say_if_killed(evidence: Evidence) -> None:
    """Print why the script was killed, if it was."""
    if evidence.hang or evidence.out_of_time:
        say(f"the script {'hangs' if evidence.hang else 'took too long'}, so it was killed")


def check_complete(evidence: Evidence) -> None:
    """Print why the script was killed, if it was. Raises `UserError` if events were lost."""
    say_if_killed(evidence)
    try:
        evidence.require_all_events()
    except NotChecked as reason:
        raise UserError(str(reason)) from None


def too_few_steps(evidence: Evidence) -> UserError:
    """Return the error for a script that has made too few optimizer steps to measure."""
    steps = [f"rank {rank.number}: {len(rank.of('step'))}" for rank in evidence.ranks]
    last = "".join(last_lines(evidence.log)[-1:])
    return UserError(
        f"the script has made too few optimizer steps to measure ({', '.join(steps)}), and has "
        f"ended with exit code {evidence.exit_code}: {last}"
    )


def processes_in_words(connected: int, started: int) -> str:
    """Return for example "2 connected processes", or "2 processes, 1 connected"."""
    if started > connected:
        return f"{counted(started, 'process')}, {connected} connected"
    return counted(connected, "connected process")


def own_outputs() -> list[list[int]]:
    """Return the device and inode of the files that this command itself prints to."""
    files = []
    for stream in (1, 2):
        with suppress(OSError):  # it is closed
            files.append([os.fstat(stream).st_dev, os.fstat(stream).st_ino])
    return files


def check_usable(evidence: Evidence, log: str, gpu: bool = False, name: str = "audit") -> None:
    """Raise `UserError` if nothing was seen, or if the script needs a GPU.

    `gpu` is True if the script could see the GPUs. `log` is the path of its output, and `name` that
    of the command that observes it.
    """
    if not evidence.ranks:
        lines = evidence.log.strip().splitlines()
        last = f"; its last line: {lines[-1]}" if lines else ""
        raise UserError(
            "no training process has reported: the command starts none, or they ignore PYTHONPATH. "
            f"Its exit code was {evidence.exit_code}; its output is in {log}{last}."
        )
    if any(rank.of("spawned") and rank.is_of_torchrun for rank in evidence.ranks):
        raise UserError(
            "the script starts its processes itself, so don't start it several times: "
            f"accel-demo {name} -- python SCRIPT"
        )
    errors = [rank.error for rank in evidence.ranks if rank.error]
    if len(evidence.ranks) == 1 and any(NEEDS_LAUNCHER.search(str(error)) for error in errors):
        raise UserError(
            "the script needs a launcher, which sets RANK and other variables: "
            f"accel-demo {name} SCRIPT, or accel-demo {name} -- torchrun …"
        )
    for rank in evidence.ranks if not gpu else []:
        if (place := _line_that_needs_gpu(rank, evidence.log)) is not None:
            raise UserError(
                f"the script needs a GPU: {short_path(place[0])}:{place[1]}: {text_of(place)}. "
                "Let it fall back to the CPU and gloo, or use --gpu."
            )
    if evidence.hang or any(rank.of("connecting", "backward", "step") for rank in evidence.ranks):
        return
    if all(error["type"] == "SystemExit" for error in errors):  # for example, an option is missing
        last = "".join(last_lines(evidence.log)[-1:])
        raise UserError(f"the command did not train; its output is in {log}: {last}")


def _line_that_needs_gpu(rank: Rank, log: str) -> list | None:
    """Return the file and number of the line that failed because there is no GPU, or None."""
    if rank.crash_line and NO_DRIVER in log and not rank.of("step"):  # PyTorch's C++ code aborts
        return rank.crash_line
    if not rank.error or not rank.error["places"]:
        return None
    place, message = rank.error["places"][-1], QUOTED.sub("", rank.error["message"])
    if not message.strip():  # for example, assert torch.cuda.is_available()
        message = "" if rank.of("step") else text_of(place)
    return place if NEEDS_GPU.search(message) else None

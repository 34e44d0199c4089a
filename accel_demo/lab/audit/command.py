"""Run a training script under observation, and print what is wrong with it.

accel-demo audit train.py
accel-demo audit --steps 50 -- torchrun --nproc-per-node 2 train.py --epochs 3

The script is run unchanged and without GPUs; a script without a launcher, in two processes. Its
loaders return only a few batches, so that the end of an epoch, the evaluation and saving are
reached, and the run ends after a few optimizer steps. Files that it overwrites are put back
afterwards.

The exit code is 0 if there is nothing above a note, 1 if there are findings, and 2 if the script
could not be observed.
"""

import os
import re
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

from accel_demo.errors import UserError, say
from accel_demo.lab.audit import launches
from accel_demo.lab.audit.all_checks import CHECKS, EXPLAINS
from accel_demo.lab.audit.checks import deaths
from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.keeper import clean_up
from accel_demo.lab.audit.observed_command import ObservedCommand
from accel_demo.lab.audit.ranks import Rank, read_launches, trains
from accel_demo.lab.audit.result import (
    ERROR,
    VERDICTS,
    AuditResult,
    Finding,
    NotChecked,
    RankSummary,
    short_path,
    text_of,
)
from accel_demo.lab.audit.tables import print_result
from accel_demo.lab.output import write_json
from accel_demo.options import Parser, check_outputs
from accel_demo.wording import counted

# In the message or the line of an error: the script cannot run without a GPU
NEEDS_GPU = re.compile(r"\bcuda|nccl|nvidia|\bgpus?\b", re.IGNORECASE)
NEEDS_LAUNCHER = re.compile(r"\bvariable \w+ expected|'(LOCAL_)?(RANK|WORLD_SIZE)'")
NO_DRIVER = "Found no NVIDIA driver"
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S*")  # names and paths, which may contain "gpu"


def main(arguments: list[str]) -> int:
    options = read_options(arguments)
    try:
        folder = Path(tempfile.mkdtemp(prefix="accel-demo-audit-"))
    except OSError as error:
        raise UserError(f"cannot create a temporary folder ({error.strerror})") from None
    command = launches.command_for(options.command, options.processes)
    plan = {
        "command": command,
        "environment": launches.environment_for(folder, options),
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
        evidence.seconds_to_notice = observed.seconds_to_notice
        check_usable(evidence, plan["log"], options.gpu)
    except BaseException:
        for path, reason in observed.not_restored.items():
            say(f"not put back: {short_path(path)} ({reason})")
        raise
    finally:
        clean_up(folder)
    result = result_of(evidence, ended, command, waits)
    print_result(result)
    if options.json:
        write_json(options.json, "audit", result)
    return int(result.has_findings)


def own_outputs() -> list[list[int]]:
    """Return the device and inode of the files that this command itself prints to."""
    files = []
    for stream in (1, 2):
        with suppress(OSError):  # it is closed
            files.append([os.fstat(stream).st_dev, os.fstat(stream).st_ino])
    return files


def check_usable(evidence: Evidence, log: str, gpu: bool = False) -> None:
    """Raise `UserError` if there is nothing to check, or if the script needs a GPU.

    `gpu` is True if the script could see the GPUs. `log` is the path of its output.
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
            "accel-demo audit -- python SCRIPT"
        )
    errors = [rank.error for rank in evidence.ranks if rank.error]
    if len(evidence.ranks) == 1 and any(NEEDS_LAUNCHER.search(str(error)) for error in errors):
        raise UserError(
            "the script needs a launcher, which sets RANK and other variables: "
            "accel-demo audit SCRIPT, or accel-demo audit -- torchrun …"
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
        last = "".join(deaths.last_lines(evidence.log)[-1:])
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


def run_checks(evidence: Evidence) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings, the gravest first, and why checks were not made."""
    findings, skipped = [], {}
    for name, check in CHECKS.items():
        try:
            if name not in ("deaths", "collectives"):
                evidence.require_all_events()
            findings += check(evidence)
        except NotChecked as reason:
            skipped[name] = str(reason)
        except Exception as error:  # the other findings are still right
            skipped[name] = f"the check itself failed ({error!r})"
    findings += deaths.unexplained(evidence, findings)
    proven = [finding.check for finding in findings if finding.verdict == ERROR]
    explained = set().union(*(EXPLAINS.get(name, set()) for name in proven))
    findings = [finding for finding in findings if finding.check not in explained]
    return sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict)), skipped


def result_of(evidence: Evidence, ended: dict, command: list[str], waits: list[str]) -> AuditResult:
    """Return the result of an audit. `ended` is the result of the keeper."""
    findings, skipped = run_checks(evidence)
    for rank in evidence.ranks:
        for event in rank.of("fault"):
            reason = f"the observer failed ({event['message']})"
            skipped.setdefault(f"what {event['hook']} sees", reason)
    if not ended["all_watched"]:
        skipped["files that other programs change"] = "there are too many files in this folder"
    for launch in filter(trains, evidence.other_launches):
        reason = "the audit checks only one launch"
        skipped[f"another launch of {counted(len(launch), 'process')}"] = reason
    if ended["unseen"] or any(evidence.counts("program")):
        what = "files that other programs change outside this folder or in hidden folders"
        skipped[what] = "only changes by this script's Python code are seen and put back there"
    enough = [event["steps"] for rank in evidence.ranks for event in rank.of("enough")]
    if enough:
        skipped["the rest of the run"] = f"it was ended after {max(enough)} steps (see --steps)"
    elif evidence.out_of_time:
        skipped["the rest of the run"] = "it did not end in time (see --timeout)"
    ends = [event for rank in evidence.ranks for event in rank.of("pass end")]
    whole = max((end["whole"] or 0 for end in ends if end["batches"] != end["whole"]), default=0)
    if whole:
        read = max(end["batches"] for end in ends if end["whole"] == whole)
        reason = f"passes ended after {read} of {whole} batches (see --batches)"
        skipped["the rest of the epochs"] = reason
    return AuditResult(
        command_line=command,
        exit_code=evidence.exit_code,
        hang=evidence.hang,
        seconds_to_notice=evidence.seconds_to_notice if evidence.hang else None,
        out_of_time=evidence.out_of_time,
        stopped_after_steps=max(enough, default=None),
        ranks=[
            RankSummary(
                rank.number,
                rank.pid,
                len(rank.of("step")),
                len(rank.of("batch")),
                len(rank.collectives),
            )
            for rank in evidence.ranks
        ],
        findings=findings,
        checked=[name for name in CHECKS if name not in skipped],
        not_checked=skipped,
        waits=waits if not evidence.hang else [],
        restored=ended["changed"],
        not_restored=dict.fromkeys(
            ended["unseen"], "not changed by a Python call that the audit sees"
        )
        | ended["not_restored"],
        new=ended["new"],
        killed_processes=0 if evidence.hang or evidence.out_of_time else ended["left"],
    )


def read_options(arguments: list[str]):
    """Parse and check the options. Raises `UserError` if an option is invalid."""
    own, command = arguments, []
    scripts = [n for n, word in enumerate(arguments) if word.endswith(".py")]
    if "--" in arguments[: min(scripts, default=None)]:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    elif scripts:  # all words after the script belong to it
        own, command = arguments[: scripts[0]], arguments[scripts[0] :]
    usage = "accel-demo audit [OPTIONS] (SCRIPT [ARGUMENTS] | -- COMMAND …)"
    parser = Parser(__doc__, prog="accel-demo audit", usage=usage)
    add = parser.add_argument
    help = "processes to start for a Python script (default: 2 for a SCRIPT)"
    add("-n", "--processes", type=int, metavar="N", help=help)
    parser.add_option("--steps", 20, "end the run after N optimizer steps; 0 never", least=0)
    parser.add_option(
        "--batches", 8, "end each pass over a loader after N to 2 N - 1 batches; 0 never", least=0
    )
    add(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="stop after S seconds (default: 600)",
    )
    add("--gpu", action="store_true", help="do not hide the GPUs")
    add("--keep", action="store_true", help="do not put files back that the script has changed")
    parser.add_json()
    options, rest = parser.parse_known_args(own)
    if rest and rest[0].startswith("-"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        words = " ".join([*rest, *command])
        raise UserError(f"put -- before a command: accel-demo audit -- {words}")
    if not command:
        raise UserError("which script? For example: accel-demo audit train.py")
    if not 0 < options.timeout <= 86_400:
        raise UserError(f"--timeout must be above 0 and at most 86400, got {options.timeout:g}")
    if options.processes is not None and not 1 <= options.processes <= 16:
        raise UserError(f"--processes must be from 1 to 16, got {options.processes}")
    options.command = command
    check_outputs(options)
    launches.check_program(command)
    launches.command_for(command, options.processes)
    return options

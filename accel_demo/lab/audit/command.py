"""Run a training script under observation, and print what is wrong with it.

accel-demo audit train.py
accel-demo audit --steps 50 -- torchrun --nproc-per-node 2 train.py --epochs 3

The script is run unchanged, in at least two processes and without GPUs. Its loaders return only a
few batches, so that the end of an epoch, the evaluation and saving are reached, and the run ends
after a few optimizer steps. Files that it overwrites are put back afterwards.

Exit code: 0 if there is nothing above a note, 1 if there are findings, 2 if the script could not be
observed.
"""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path

from accel_demo.errors import UserError, say
from accel_demo.lab.audit import launches
from accel_demo.lab.audit.all_checks import CHECKS, EXPLAINS
from accel_demo.lab.audit.evidence import Evidence, read
from accel_demo.lab.audit.findings import (
    NOTE,
    VERDICTS,
    Finding,
    NotChecked,
    short_path,
    text_of,
)
from accel_demo.lab.audit.report import print_report
from accel_demo.lab.audit.supervisor import ObservedCommand
from accel_demo.options import Parser
from accel_demo.processes.cleanup import sigterm_raises

# Parts of the messages of a script that cannot run without a GPU
NEEDS_GPU = (
    "not compiled with CUDA",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "no GPUs found",
    "torch.cuda.is_available() is False",
    "have NCCL built in",
    "Invalid device id",
    "CUDA-capable device",
)


def main(arguments: list[str]) -> int:
    options = read_options(arguments)
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises(KeyboardInterrupt))
        folder = Path(tempfile.mkdtemp(prefix="accel-demo-audit-"))
        log = folder / "output.txt"
        has_gpus = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))
        environment = launches.environment_for(
            folder, options.batches, options.steps, options.gpu, has_gpus
        )
        plan = {
            "command": launches.command_for(options.command, options.processes),
            "environment": environment,
            "folder": str(Path.cwd()),
            "log": str(log),
            "keep": options.keep,
        }
        say(f"running: {' '.join(plan['command'])}")
        say(f"its output: {log}")
        supervisor = ObservedCommand(folder, plan, options.timeout)
        result = supervisor.run()
        if result["error"]:
            raise UserError(result["error"])
        evidence = Evidence(read(folder), result["code"], supervisor.hang, supervisor.out_of_time)
        check_usable(evidence, log)
        findings, skipped = run_checks(evidence)
        print_report(evidence, findings, skipped, result, supervisor.waits)
        if options.json:
            options.json.write_text(json.dumps(as_json(evidence, findings, skipped), indent=2))
        return int(any(finding.verdict != NOTE for finding in findings))


def check_usable(evidence: Evidence, log: Path) -> None:
    """Raise `UserError` if there is nothing to check, or if the script needs a GPU."""
    if not evidence.ranks:
        raise UserError(
            "no training process has reported: the command starts none, or they ignore PYTHONPATH. "
            f"Its exit code was {evidence.exit_code}; its output is in {log}."
        )
    for rank in evidence.ranks:
        if rank.error and any(words in rank.error["message"] for words in NEEDS_GPU):
            place = (rank.error["places"] or [["the script", 0, ""]])[-1]
            raise UserError(
                f"the script needs a GPU: {short_path(place[0])}:{place[1]}: {text_of(place)}. "
                "Let it fall back to the CPU and gloo, or use --gpu."
            )
    if not any(rank.of("backward", "step") or rank.error for rank in evidence.ranks):
        if not evidence.hang and not evidence.is_distributed:
            raise UserError(f"the command did not train. Its output is in {log}.")


def run_checks(evidence: Evidence) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings, the gravest first, and why checks were not made."""
    findings, skipped = [], {}
    for name, check in CHECKS.items():
        try:
            findings += check(evidence)
        except NotChecked as reason:
            skipped[name] = str(reason)
    explained = set().union(*(EXPLAINS.get(finding.check, set()) for finding in findings))
    findings = [finding for finding in findings if finding.check not in explained]
    return sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict)), skipped


def as_json(evidence: Evidence, findings: list[Finding], skipped: dict[str, str]) -> dict:
    return {
        "ranks": [
            {"rank": rank.number, "pid": rank.pid, "steps": len(rank.of("step"))}
            for rank in evidence.ranks
        ],
        "hang": evidence.hang,
        "findings": [
            {
                **{
                    name: getattr(each, name)
                    for name in ("verdict", "check", "sentence", "cure", "page")
                },
                "places": [
                    {"file": file, "line": line, "ranks": ranks}
                    for (file, line), ranks in each.places.items()
                ],
            }
            for each in findings
        ],
        "not_checked": skipped,
    }


def read_options(arguments: list[str]):
    """Parse and check the options. Raises `UserError` if an option is invalid."""
    own, command = arguments, []
    if "--" in arguments:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    usage = "accel-demo audit [OPTIONS] (SCRIPT [ARGUMENTS] | -- COMMAND …)"
    parser = Parser(__doc__, prog="accel-demo audit", usage=usage)
    add = parser.add_argument
    help = "processes to start for a Python script (default: 2 for a SCRIPT)"
    add("-n", "--processes", type=int, metavar="N", help=help)
    parser.add_option("--steps", 20, "end the run after N optimizer steps; 0 never", least=0)
    parser.add_option("--batches", 8, "batches in each pass over a loader; 0 for all", least=0)
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
    if not command:
        parser.add_argument("script", nargs="?", metavar="SCRIPT")
        options, rest = parser.parse_known_args(own)
        if options.script is None:
            raise UserError("which script? For example: accel-demo audit train.py")
        command = [options.script, *rest]
        if not options.script.endswith(".py"):
            raise UserError(f"put -- before a command: accel-demo audit -- {' '.join(command)}")
    else:
        options = parser.parse_args(own)
    if not 0 < options.timeout <= 86_400:
        raise UserError(f"--timeout must be above 0 and at most 86400, got {options.timeout:g}")
    if options.processes is not None and not 1 <= options.processes <= 16:
        raise UserError(f"--processes must be from 1 to 16, got {options.processes}")
    options.command = command
    launches.check_program(command)
    launches.command_for(command, options.processes)
    return options

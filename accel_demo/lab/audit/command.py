"""Run a training script under observation, and print what is wrong with it.

accel-demo audit train.py
accel-demo audit --steps 50 -- torchrun --nproc-per-node 2 train.py --epochs 3

The script is run unchanged and without GPUs; a script without a launcher, in two processes. Its
loaders return only a few batches, so that it soon reaches the end of an epoch, and the run ends
after a few optimizer steps. With --steps 0, it ends where the script ends, so that mistakes are
also found in what the script does last, such as saving. Files that it overwrites are put back
afterwards; new files stay.

The exit code is 0 if there is nothing above a note, 1 if there are findings, and 2 if the script
could not be observed.
"""

from accel_demo.lab.audit.all_checks import CHECKS, EXPLAINS
from accel_demo.lab.audit.checks import deaths, schedule
from accel_demo.lab.audit.result import (
    ERROR,
    VERDICTS,
    AuditResult,
    Finding,
    RankSummary,
)
from accel_demo.lab.audit.tables import print_result
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observation import add_options, add_processes, observe, read_command
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import trains
from accel_demo.lab.output import write_json
from accel_demo.observer.limits import BATCHES, STEPS
from accel_demo.options import Parser
from accel_demo.wording import counted


def main(arguments: list[str]) -> int:
    options = read_command(make_parser(), arguments, "audit")
    limits = {BATCHES: str(options.batches), STEPS: str(options.steps)}
    seen = observe(options, "audit", limits)
    result = result_of(seen.evidence, seen.ended, seen.command, seen.waits)
    print_result(result)
    if options.json:
        write_json(options.json, "audit", result, of_script=True)
    return int(result.has_findings)


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
    if reason := schedule.why_length_is_unknown(evidence):
        skipped["lengths of the schedules"] = reason
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


def make_parser() -> Parser:
    usage = "accel-demo audit [OPTIONS] (SCRIPT [ARGUMENTS] | -- COMMAND …)"
    parser = Parser(__doc__, prog="accel-demo audit", usage=usage)
    add_processes(parser)
    parser.add_option("--steps", 20, "end the run after N optimizer steps; 0 never", least=0)
    parser.add_option(
        "--batches", 8, "end each pass over a loader after N to 2 N - 1 batches; 0 never", least=0
    )
    add_options(parser)
    parser.add_json()
    return parser

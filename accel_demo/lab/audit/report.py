"""Print the findings of an audit."""

from accel_demo.lab.audit.all_checks import CHECKS
from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.findings import (
    NOTE,
    Finding,
    ranks_in_words,
    short_path,
    text_of,
)


def print_report(
    evidence: Evidence,
    findings: list[Finding],
    skipped: dict[str, str],
    result: dict,
    waits: list[str],
) -> None:
    world = len(evidence.ranks)
    for finding in findings:
        if finding.verdict == NOTE:
            continue
        print(f"\n{finding.verdict}: {finding.sentence}")
        for place, ranks in finding.places.items():
            print(f"  {short_path(place[0])}:{place[1]} ({ranks_in_words(ranks, world)})")
            print(f"      {text_of(place)}")
        print(f"  cure: {finding.cure}")
        print(f"  page: {finding.page}")
    print()
    for finding in findings:
        if finding.verdict == NOTE:
            print(f"note: {finding.sentence} ({finding.page})")
    for line in waits:
        print(f"warning: {line}")
    seen = [
        f"{world} process{'es' if world > 1 else ''}",
        f"{max(evidence.counts('step'))} optimizer steps",
        f"{max(evidence.counts('batch'))} batches",
        f"{max(len(rank.collectives) for rank in evidence.ranks)} collectives per process",
    ]
    done = [name for name in CHECKS if name not in skipped]
    print(f"checked: {', '.join(done)} ({', '.join(seen)})")
    enough = next((each for rank in evidence.ranks for each in rank.of("enough")), None)
    if enough:
        print(f"not checked: what happens after {enough['steps']} optimizer steps (see --steps)")
    elif evidence.out_of_time:
        print("not checked: the rest of the run, because it did not end in time (see --timeout)")
    for name, reason in skipped.items():
        print(f"not checked: {name}, because {reason}")
    faults = {
        (event["hook"], event["message"]) for rank in evidence.ranks for event in rank.of("fault")
    }
    for hook, message in sorted(faults):
        print(f"not checked: what the observer's {hook} sees, because it failed ({message})")
    if result["left"] and not (evidence.hang or evidence.out_of_time):
        print(f"killed: {result['left']} processes that were still running after the command")
    for path in result["changed"]:
        print(f"put back: {short_path(path)}, which the script had changed")
    for path in result["new"]:
        print(f"new: {short_path(path)}")
    for rank in evidence.ranks:
        for event in rank.of("unprotected"):
            print(f"not put back: {short_path(event['path'])} ({event['reason']})")

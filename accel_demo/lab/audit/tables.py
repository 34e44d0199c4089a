"""Print the result of an audit."""

from accel_demo.lab.audit.all_checks import TITLES
from accel_demo.lab.audit.result import NOTE, AuditResult, Finding
from accel_demo.lab.observed.places import ranks_in_words, short_path
from accel_demo.terminal import display, fill
from accel_demo.wording import counted

MOST_FILES = 10  # that are named one by one


def print_result(result: AuditResult) -> None:
    """Print the findings, the gravest first, then what was checked and what was not."""
    world = len(result.ranks)
    for finding in result.findings:
        if finding.verdict != NOTE:
            _print_finding(finding, world)
    for line in result.waits:
        display(f"\nwarning: {line}")
    if not result.has_findings:
        display(f"no errors, no warnings{_reservation(result)}")
    display()
    for finding in result.findings:
        if finding.verdict == NOTE:
            where = [f"{short_path(each.file)}:{each.line}: " for each in finding.places[:1]]
            display(f"note: {''.join(where)}{finding.sentence} (page: tutorials/{finding.page}.md)")
    seen = [
        counted(max(rank.optimizer_steps for rank in result.ranks), "optimizer step"),
        f"{max(rank.batches for rank in result.ranks)} batches",
        f"{max(rank.collectives for rank in result.ranks)} collectives",
    ]
    names = [TITLES[name] for name in result.checked]
    checked = f"checked in {counted(world, 'process')}: {', '.join(names) or 'nothing'}"
    display(fill(checked, 100, indent="  "))
    display(f"seen: at most {', '.join(seen)} per rank")
    for name, reason in result.not_checked.items():
        display(f"not checked: {TITLES.get(name, name)}: {reason}")
    changed = [f"{short_path(path)}, which the script had changed" for path in result.restored]
    _print_files("put back", changed)
    lost = [f"{short_path(path)} ({reason})" for path, reason in result.not_restored.items()]
    _print_files("not put back", lost)
    _print_files("new", [short_path(path) for path in result.new])
    if result.killed_processes:
        display(f"killed after the end: {counted(result.killed_processes, 'process')}")


def _reservation(result: AuditResult) -> str:
    """Return why a result without errors and warnings means little, or ""."""
    if len(result.ranks) == 1:
        return ", but there was only one process: nothing was compared"
    if not any(rank.optimizer_steps for rank in result.ranks):
        return ", but no optimizer step was seen"
    return ""


def _print_files(what: str, lines: list[str]) -> None:
    for line in lines[:MOST_FILES]:
        display(f"{what}: {line}")
    if len(lines) > MOST_FILES:
        display(f"{what}: {counted(len(lines) - MOST_FILES, 'more file')}")


def _print_finding(finding: Finding, world: int) -> None:
    display(f"\n{finding.verdict}: {finding.sentence}")
    for place in finding.places:
        display(f"  {short_path(place.file)}:{place.line} ({ranks_in_words(place.ranks, world)})")
        display(f"      {place.text}")
    display(f"  cure: {finding.cure}")
    display(f"  page: tutorials/{finding.page}.md")

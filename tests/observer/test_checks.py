"""Test that each check finds its fault in a wrong script, and nothing in the right ones.

The scripts run in two connected processes that are forked from the fork server.
"""

from pathlib import Path

import pytest
import yaml

from accel_demo.lab.audit.command import run_checks
from accel_demo.lab.audit.evidence import Evidence, read
from accel_demo.lab.audit.result import NOTE, Finding
from tests.conftest import rank_environments, start_process, wait_for_all
from tests.exercises.wrong_answers import patched

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
SCRIPTS, FAULTS = CASES["scripts"], CASES["faults"]
OBSERVED = Path(__file__).with_name("observed.py")


def observe(script: str, folder: Path) -> Evidence:
    """Run a script in two connected processes under observation."""
    path, events = folder / "script.py", folder / "events"
    path.write_text(script)
    events.mkdir()
    with rank_environments(2) as environments, open(folder / "output.txt", "w+") as output:
        processes = [
            start_process(
                ["python", OBSERVED, path],
                output,
                output,
                cwd=folder,
                ACCEL_DEMO_AUDIT=str(events),
                **environment,
            )
            for environment in environments
        ]
        assert wait_for_all(processes, timeout=60), (folder / "output.txt").read_text()
    log = (folder / "output.txt").read_text()
    evidence = Evidence(read(events), max(process.returncode for process in processes), log)
    assert len(evidence.ranks) == 2, log
    return evidence


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_with_its_line(name, tmp_path):
    fault = FAULTS[name]
    evidence = observe(patched(SCRIPTS[fault["of"]], fault["diff"]), tmp_path)
    assert not [event for rank in evidence.ranks for event in rank.of("fault")]
    found = findings_above_notes(evidence)
    assert [finding.check for finding in found] == [fault["check"]]
    assert fault["line"] in [place.text for place in found[0].places]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_right_script_causes_no_finding(name, tmp_path):
    evidence = observe(SCRIPTS[name], tmp_path)
    assert not [event for rank in evidence.ranks for event in rank.of("fault")]
    assert min(evidence.counts("step")) >= 9
    assert findings_above_notes(evidence) == []


def findings_above_notes(evidence: Evidence) -> list[Finding]:
    findings, _ = run_checks(evidence)
    return [finding for finding in findings if finding.verdict != NOTE]

"""Test each check with pairs of scripts: a wrong one, in which it finds the fault, and a right one.

cases.yaml contains the right scripts, and the edits that make them wrong.
"""

from pathlib import Path

import pytest
import yaml

from accel_demo.lab.audit.command import run_checks
from accel_demo.lab.audit.evidence import Evidence, read
from accel_demo.lab.audit.findings import NOTE, text_of
from tests.conftest import rank_environments, start_process, wait_for_all
from tests.exercises.wrong_answers import patched

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
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
    evidence = Evidence(read(events), max(process.returncode for process in processes))
    assert len(evidence.ranks) == 2, (folder / "output.txt").read_text()
    return evidence


@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_found_with_its_line(name, tmp_path):
    case = CASES[name]
    evidence = observe(patched(case["right"], case["wrong"]), tmp_path)
    findings, _ = run_checks(evidence)
    assert not [event for rank in evidence.ranks for event in rank.of("fault")]
    assert [finding.check for finding in findings if finding.verdict != NOTE] == [case["finds"]]
    assert case["line"] in [text_of(place) for place in findings[0].places]


@pytest.mark.parametrize("name", CASES)
def test_a_right_script_causes_no_finding(name, tmp_path):
    evidence = observe(CASES[name]["right"], tmp_path)
    findings, _ = run_checks(evidence)
    assert not [event for rank in evidence.ranks for event in rank.of("fault")]
    assert [finding for finding in findings if finding.verdict != NOTE] == []

"""Test that each check finds its fault in a wrong script, and nothing in the right ones.

The scripts run in two connected processes that are forked from the fork server.
"""

import re
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from accel_demo.errors import UserError
from accel_demo.lab.audit.checks import schedule
from accel_demo.lab.audit.checks.settings import different_setting
from accel_demo.lab.audit.command import run_checks
from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observation import check_usable
from accel_demo.lab.observed.ranks import read_launches
from accel_demo.observer import loaders
from accel_demo.observer.copies import unwritten
from tests.conftest import rank_environments, start_process, wait_for_all
from tests.exercises.wrong_answers import patched

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
SCRIPTS, FAULTS = CASES["scripts"], CASES["faults"]
OBSERVED = Path(__file__).with_name("observed.py")


def text_of(entry: dict | str) -> str:
    """Return the text of a script, or of an edit of a script."""
    if isinstance(entry, str):
        return entry
    return patched(text_of(SCRIPTS[entry["of"]]), entry["diff"])


def observe(script: str, folder: Path, least: int = 2, **limits: str) -> Evidence:
    """Run a script in two processes under observation. `least` of them must report.

    `limits` are environment variables, by default those of `accel-demo audit`.
    """
    limits = limits or {"ACCEL_DEMO_AUDIT_BATCHES": "8", "ACCEL_DEMO_AUDIT_STEPS": "20"}
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
                **limits,
                **environment,
            )
            for environment in environments
        ]
        assert wait_for_all(processes, timeout=60), (folder / "output.txt").read_text()
    log = (folder / "output.txt").read_text()
    [ranks] = read_launches(events)
    evidence = Evidence(ranks, max(process.returncode for process in processes), log)
    evidence.unwritten = unwritten(str(events))
    assert least <= len(evidence.ranks) <= 2, log
    return evidence


def names_of(entries: dict) -> list:
    """Return the names of the entries. Those with "slow: true" are left out of the default run."""
    slow = [name for name, entry in entries.items() if isinstance(entry, dict) and "slow" in entry]
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in entries]


@pytest.mark.parametrize("name", names_of(FAULTS))
def test_the_fault_is_found_with_its_line(name, tmp_path):
    fault = FAULTS[name]
    evidence = observe(text_of(fault), tmp_path)
    assert not [event for rank in evidence.ranks for event in rank.of("fault")]
    findings, _ = run_checks(evidence)
    if fault["verdict"] != NOTE:
        findings = [each for each in findings if each.verdict != NOTE]
    assert {(each.check, each.verdict) for each in findings} == {(fault["check"], fault["verdict"])}
    assert fault["line"] in [place.text for each in findings for place in each.places]


@pytest.mark.parametrize("name", names_of(SCRIPTS))
def test_a_right_script_causes_no_finding(name, tmp_path):
    evidence = observe(text_of(SCRIPTS[name]), tmp_path)
    assert not [event for rank in evidence.ranks for event in rank.of("fault")]
    assert min(evidence.counts("step")) >= 9
    assert run_checks(evidence)[0] == []  # not even a note


def test_no_loader_is_not_taken_for_a_deleted_one(monkeypatch):
    monkeypatch.setattr(loaders, "_loaders", [])
    loaders._entry_of(DataLoader([1]), ("key",))
    assert [own.loader() for own in loaders._loaders] == [None]
    assert loaders.number_of(None) is None


def test_all_values_of_a_setting_that_differs_are_named():
    groups = [[{"lr": 0.1, "betas": [0.9, beta]}] for beta in (0.99, 0.999)]
    assert different_setting(groups) == ("betas", ["(0.9, 0.99)", "(0.9, 0.999)"])


@pytest.mark.slow
def test_different_settings_for_models_that_differ_are_a_warning(tmp_path):
    script = text_of(SCRIPTS["by_hand"]).replace("lr=0.01", "lr=0.01 * (rank + 1)")
    script = script.replace("    model = ", "    torch.manual_seed(rank)\n    model = ")
    findings, _ = run_checks(observe(script, tmp_path))
    assert {each.check: each.verdict for each in findings} == {
        "initial": ERROR,
        "settings": WARNING,
    }


def test_repeated_samples_of_an_evaluation_are_a_note(tmp_path):
    evidence = observe(text_of(SCRIPTS["evaluation"]).replace("96", "95"), tmp_path)
    [note], _ = run_checks(evidence)
    assert (note.verdict, note.check) == (NOTE, "metrics")
    assert "repeats 1 sample in this evaluation" in note.sentence


def test_metrics_are_not_checked_if_the_recorder_has_lost_collectives(tmp_path):
    script = text_of(SCRIPTS["evaluation"]).replace(
        "dist.all_reduce(total)", "dist.all_reduce(total)\n    [dist.barrier() for _ in range(9)]"
    )
    script = 'import os\nos.environ["TORCH_FR_BUFFER_SIZE"] = "4"\n' + script
    findings, skipped = run_checks(observe(script, tmp_path))
    assert findings == []
    assert skipped["metrics"] == "there were more collectives than the Flight Recorder stores"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the scripts would find a GPU")
@pytest.mark.parametrize(
    "line",
    [
        'torch.ones(1, device="cuda")',
        'torch.distributed.init_process_group("nccl")',
        'torch.distributed.init_process_group("gloo"); os.write(2, DRIVER); os.abort()',
    ],
)
def test_a_script_that_insists_on_a_gpu_is_named_with_its_line(line, tmp_path):
    begin = "import os, torch\nDRIVER = b'Found no NVIDIA driver on your system.'\n"
    evidence = observe(f"{begin}{line}\n", tmp_path, least=1)
    with pytest.raises(UserError, match=re.escape(f"script.py:3: {line}.")):
        check_usable(evidence, "output.txt")


def findings_above_notes(evidence: Evidence) -> list[Finding]:
    return [finding for finding in run_checks(evidence)[0] if finding.verdict != NOTE]


SCHEDULED = """
import torch
from torch import nn

torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.{}
for _ in range({}):
    model(torch.rand(4, 2)).mean().backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("scheduler", "steps", "reason"),
    [
        ("CosineAnnealingLR(optimizer, 10)", 10, None),
        ("CosineAnnealingLR(optimizer, 30)", 30, "only a complete run shows them"),
        ("LambdaLR(optimizer, lambda step: 1 / (step + 1))", 10, "a LambdaLR has no known end"),
    ],
)
def test_the_length_of_a_schedule_is_known_only_from_its_end_in_a_complete_run(
    scheduler, steps, reason, tmp_path
):
    evidence = observe(SCHEDULED.format(scheduler, steps), tmp_path)
    assert evidence.is_distributed and evidence.counts("schedule") == [min(steps, 20)] * 2
    assert (schedule.why_length_is_unknown(evidence) or "None").startswith(str(reason))

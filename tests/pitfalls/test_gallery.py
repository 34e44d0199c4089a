"""Test that each broken script of the gallery breaks as its entry says, and each fixed one works.

Most scripts run in two processes that are forked from the fork server, under observation. Those
that start their own processes, or need a certain launcher, run as their entry says.
"""

import difflib
import json
import shlex
from pathlib import Path

import pytest

from accel_demo.lab.audit.command import run_checks
from accel_demo.lab.audit.result import NOTE
from accel_demo.lab.explain.catalog import pitfalls
from accel_demo.lab.explain.command import explain
from tests.conftest import REPOSITORY, run_to_end
from tests.observer.test_checks import observe

SCRIPTS = REPOSITORY / "tutorials/pitfalls"
PITFALLS = {each["name"]: each for each in pitfalls()}
VERSIONS = "broken", "fixed"
QUICK = "no_set_epoch", "via_module", "gather_keeps_padding", "unused_parameters"  # run by default
EACH = [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in PITFALLS]


def run(name: str, version: str, folder: Path) -> tuple[int, str, set[str], set[str]]:
    """Run a script. Return its exit code and output, and the checks that found or noted a fault."""
    entry, script = PITFALLS[name], SCRIPTS / f"{name}_{version}.py"
    if "start" in entry:
        return run_as_its_entry_says(entry["start"].replace("SCRIPT", str(script)), folder)
    evidence = observe(script.read_text(), folder)
    connected = [1, 1] if entry.get("unconnected") and version == "broken" else [2, 2]
    assert [max(1, rank.connected_world) for rank in evidence.ranks] == connected
    assert not [event for rank in evidence.ranks for event in rank.of("fault")]
    findings, _ = run_checks(evidence)
    assert all(place.text in script.read_text() for each in findings for place in each.places)
    verdicts = [(each.check, each.verdict) for each in findings]
    return evidence.exit_code, (folder / "output.txt").read_text(), *found_and_noted(verdicts)


def run_as_its_entry_says(start: str, folder: Path) -> tuple[int, str, set[str], set[str]]:
    command = shlex.split(start)
    ended = run_to_end(command, cwd=folder)
    audit = ["accel-demo", "audit", "--json", "out.json", "--", *command]
    run_to_end(audit, cwd=folder)
    verdicts = []
    if (folder / "out.json").exists():  # not if no process of the script has trained
        findings = json.loads((folder / "out.json").read_text())["findings"]
        verdicts = [(each["check"], each["verdict"]) for each in findings]
    return ended.returncode, ended.stdout + ended.stderr, *found_and_noted(verdicts)


def found_and_noted(verdicts: list[tuple[str, str]]) -> tuple[set[str], set[str]]:
    """Return the names of the checks with an error or a warning, and of those with a note."""
    noted = {check for check, verdict in verdicts if verdict == NOTE}
    return {check for check, verdict in verdicts if verdict != NOTE}, noted


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EACH)
def test_the_broken_script_breaks_as_described_and_the_fixed_one_works(name, version, tmp_path):
    entry = PITFALLS[name]
    code, output, found, noted = run(name, version, tmp_path)
    for line in entry[version]:
        assert line in output, output
    faults = [each for each in explain(output) if not each.row.get("harmless")]
    if version == "fixed":
        assert (code, found, noted, faults) == (0, set(), set(), []), output
        return
    assert bool(faults) == bool(code or "message" in entry), output
    assert code == entry.get("exit", 0), output
    if "message" in entry:
        assert entry in [pitfall for each in faults for pitfall in each.pitfalls], faults
    assert found == set(entry.get("audit", [])), output
    assert noted >= set(entry.get("note", [])), output


@pytest.mark.parametrize("name", PITFALLS)
def test_an_entry_is_complete_and_its_scripts_are_short_and_differ_in_a_few_lines(name):
    entry = PITFALLS[name]
    assert bool(entry.get("audit") or entry.get("note")) != ("unseen" in entry)
    for key in ("title", "cause", "cure"):
        assert entry[key]
    assert entry["cause"].endswith(".") and entry["cure"].endswith(".")
    texts = [(SCRIPTS / f"{name}_{version}.py").read_text() for version in VERSIONS]
    for version, text in zip(VERSIONS, texts, strict=True):
        assert f"tutorials/pitfalls/{name}_{version}.py" in text.split('"""')[1]
        assert 12 <= len(text.splitlines()) <= 48
    code = [text.split('"""', 2)[2].splitlines() for text in texts]
    changes = [line for line in difflib.ndiff(*code) if line[:2] in ("- ", "+ ")]
    assert 1 <= len(changes) <= 12, changes


def test_every_script_of_the_gallery_has_an_entry():
    expected = {f"{name}_{version}" for name in PITFALLS for version in VERSIONS}
    assert {each.stem for each in SCRIPTS.glob("*.py")} == expected

"""Test `accel-demo audit` on scripts that use other frameworks: transformers' Trainer, Lightning.

It prints the version of the framework.
"""

import json
from importlib.metadata import PackageNotFoundError, version

import pytest
import yaml
from packaging.version import Version

from tests.conftest import REPOSITORY
from tests.exercises.wrong_answers import patched
from tests.lab.test_audit import audit

CASES = yaml.safe_load((REPOSITORY / "tests/observer/frameworks.yaml").read_text())
SCRIPTS, FAULTS = CASES["scripts"], CASES["faults"]
LEAST = {"transformers": "5", "lightning": "2.6"}  # versions


def audit_of(script: str, folder, real: bool = False) -> dict:
    """Return the report of an audit in two processes, which Lightning's scripts start themselves.

    With `real`, no process is forked from the fork server, which has imported torch before. Skip
    the test if the framework is not installed.
    """
    package = "transformers" if "transformers" in script else "lightning"
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"needs {package}: pip install -e '.[frameworks]'")
    print(package, installed)
    assert Version(installed) >= Version(LEAST[package])
    (folder / "train.py").write_text(script)
    launch = ["-n", "2"] if package == "transformers" or "Fabric" in script else []
    words = ["--json", "out.json", *launch, "--", "python", "train.py"]
    # A script that starts its second process itself does so with Python, not with the fork server.
    result = audit(folder, *words, timeout=230, real=real or not launch)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    report = json.loads((folder / "out.json").read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert "connected" in report["checked"], result.stdout
    report["findings"] = [each for each in report["findings"] if each["verdict"] != "note"]
    assert result.returncode == bool(report["findings"])
    return report


@pytest.mark.frameworks
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_right_script_causes_no_finding(name, tmp_path):
    report = audit_of(SCRIPTS[name], tmp_path, real=True)
    assert report["findings"] == []
    assert report["exit_code"] == 0 and min(rank["optimizer_steps"] for rank in report["ranks"]) > 8
    assert {"samples", "order", "initial", "replicas", "thrown"} <= set(report["checked"])


@pytest.mark.frameworks
@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_with_its_line(name, tmp_path):
    fault = FAULTS[name]
    [finding] = audit_of(patched(SCRIPTS[fault["of"]], fault["diff"]), tmp_path)["findings"]
    assert finding["check"] == fault["check"]
    assert fault["line"] in [place["text"] for place in finding["places"]]

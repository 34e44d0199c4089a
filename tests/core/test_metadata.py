"""Test what the repository says about itself: metadata, changelog, citation, CI and container."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import accel_demo
from tests.conftest import BIN, REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WORKFLOW = REPOSITORY / ".github/workflows/ci.yml"
CITATION = REPOSITORY / "CITATION.cff"
CONTAINER = json.loads((REPOSITORY / ".devcontainer/devcontainer.json").read_text())
VERSION = metadata.version("accel-demo")


def rejected_by(schema: str, file: Path) -> str:
    """Return what check-jsonschema prints if the file does not follow a schema that comes with it.

    Return "" if the file is valid.
    """
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    command += ["--default-filetype", "yaml", str(file)]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout + result.stderr if result.returncode else ""


def workflow_errors(text: str) -> list[str]:
    """Return what actionlint's rules find in a workflow, one finding per line."""
    command = [BIN / "jactionlint", "--profile", "correctness", "--format", "oneline", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    assert (result.returncode == 0) == (result.stdout == ""), result.stderr
    return result.stdout.splitlines()


def test_the_version_is_written_once_in_the_package_or_its_metadata():
    declared = {PROJECT.get("version"), getattr(accel_demo, "__version__", None)} - {None}
    assert declared == {VERSION}


def test_the_changelog_begins_with_this_version():
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    entries = re.findall(r"^## \[(.+?)\] - (Unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert len(entries) == text.count("\n## ")
    assert entries[0][0] == VERSION


def test_the_citation_is_valid_and_names_this_version():
    assert rejected_by("vendor.citation-file-format", CITATION) == ""
    citation = yaml.safe_load(CITATION.read_text())
    assert (citation["title"], citation["version"]) == (PROJECT["name"], VERSION)
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_a_citation_without_authors_is_rejected(tmp_path):
    citation = yaml.safe_load(CITATION.read_text())
    del citation["authors"]
    (tmp_path / "CITATION.cff").write_text(yaml.safe_dump(citation))
    assert "authors" in rejected_by("vendor.citation-file-format", tmp_path / "CITATION.cff")


def test_nobody_can_upload_the_package_by_mistake():
    assert "Private :: Do Not Upload" in PROJECT["classifiers"]
    assert "Private :: Do Not Upload" in metadata.metadata("accel-demo").get_all("Classifier")


def test_the_classifiers_name_only_versions_of_python_that_the_package_supports():
    prefix = "Programming Language :: Python :: "
    versions = [line.removeprefix(prefix) for line in PROJECT["classifiers"] if prefix in line]
    versions = [version for version in versions if "." in version]
    assert "3.11" in versions
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in versions)
    assert not any("License ::" in line for line in PROJECT["classifiers"])  # `license` says it


def test_the_package_is_marked_as_typed():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (Path(accel_demo.__file__).parent / "py.typed").is_file()


def required_by(requirement: str) -> set[str]:
    """Return the names of the packages that a requirement installs, with those of its extras."""
    parsed = Requirement(requirement)
    names = {parsed.name}
    if parsed.name == PROJECT["name"]:
        for extra in parsed.extras:
            for line in PROJECT["optional-dependencies"][extra]:
                names |= required_by(line)
    return names


def test_the_group_that_uv_installs_is_the_extra_of_the_test_command():
    [group] = PYPROJECT["dependency-groups"]["dev"]
    assert required_by(group) == required_by("accel-demo[dev]") > {"pytest", "ruff", "matplotlib"}
    assert "/uv.lock" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_no_address_is_a_placeholder():
    assert "urls" not in PROJECT  # the repository has no public address
    for file in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", ".github/workflows/ci.yml"):
        text = (REPOSITORY / file).read_text()
        assert not re.search(r"example\.(com|org)|<[\w-]+>|your-|TODO", text), file


@pytest.mark.parametrize(
    "schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"]
)
def test_the_workflow_is_valid_and_each_job_has_a_time_limit(schema, tmp_path):
    assert rejected_by(schema, WORKFLOW) == ""
    without_limit = re.sub(
        r"^ +timeout-minutes: 90\n", "", WORKFLOW.read_text(), flags=re.MULTILINE
    )
    (tmp_path / "ci.yml").write_text(without_limit.replace("permissions:", "permission:"))
    assert rejected_by(schema, tmp_path / "ci.yml")


def test_actionlint_finds_nothing_in_the_workflow_and_a_misspelled_name_in_a_wrong_one():
    text = WORKFLOW.read_text()
    assert workflow_errors(text) == []
    [error] = workflow_errors(text.replace("${{ github.ref }}", "${{ github.reff }}"))
    assert 'property "reff" is not defined' in error


def test_the_workflow_runs_all_checks_and_may_only_read():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    commands = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }
    assert commands == {
        "linux": [
            'git config --global --add safe.directory "$GITHUB_WORKSPACE"',
            ".ci/run",
        ],
        "macos": ["python -m pip install -e '.[test]'", "pytest tests/core -q"],
    }


def test_the_container_installs_what_the_readme_says_with_a_python_that_is_supported():
    assert CONTAINER["postCreateCommand"] in (REPOSITORY / "README.md").read_text()
    version = re.fullmatch(r"python:(\d+\.\d+)-bookworm", CONTAINER["image"])[1]
    assert version in SpecifierSet(PROJECT["requires-python"])

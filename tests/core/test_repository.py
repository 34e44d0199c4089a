"""Test file lengths, module names, requirements and encodings, and a closed output."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "accel_demo"


def test_train_py_has_at_most_150_lines():
    assert len((PACKAGE / "train.py").read_text().splitlines()) <= 150


def test_no_module_shadows_a_known_package():
    """A train file that is run by its path looks for imports in its own folder first."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    command = "import sys, importlib.util as u; print(*filter(u.find_spec, sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-I", "-c", command, *(names - {"__init__", "__main__", "__pycache__"})],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert result.stdout.split() == []
    assert not names & set(sys.stdlib_module_names)


def test_the_constraints_name_every_requirement():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    named = {line.split("==")[0] for line in lines if "==" in line}
    required = {re.match(r"[\w-]+", line).group() for line in metadata.requires("accel-demo")}
    assert {"torch", "pytest"} < required
    assert required - {"accel-demo"} <= named


def test_closing_the_output_early_causes_no_traceback():
    command = [sys.executable, "-m", "accel_demo", "doctor"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    process.stdout.close()
    with process.stderr:
        assert (process.stderr.read(), process.wait(timeout=60)) == ("", 1)


def opened_without_encoding(source: str) -> list[str]:
    """Return the calls that read or write text in the encoding of the user's system."""
    calls = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        function, given = ast.unparse(call.func), {each.arg: each.value for each in call.keywords}
        if "encoding" in given or function in ("os.open", "gzip.open"):
            continue
        *_, name = function.split(".")
        values = [*call.args[:2], given.get("mode")]
        modes = [each.value for each in values if isinstance(each, ast.Constant)]
        modes = [mode for mode in modes if re.fullmatch("[rwxabt+]{1,3}", str(mode))]
        is_text = {
            **dict.fromkeys(("read_text", "write_text"), True),
            **dict.fromkeys(("open", "fdopen"), not modes or "b" not in modes[0]),
            **dict.fromkeys(("TemporaryFile", "NamedTemporaryFile"), modes and "b" not in modes[0]),
            **dict.fromkeys(("run", "Popen", "check_output"), "text" in given),
        }
        if is_text.get(name):
            calls.append(ast.unparse(call))
    return calls


def files_with_text() -> list[Path]:
    """Return our Python files except the course's programs, which read and write only ASCII."""
    tutorials = REPOSITORY / "tutorials"
    files = [*PACKAGE.rglob("*.py"), *(REPOSITORY / "benchmarks").glob("*.py")]
    files += [*(tutorials / "exercises" / "graders").glob("*.py"), tutorials / "40_record.py"]
    return files + [
        tutorials / f"{name}.py"
        for name in ("page_tools", "course", "command_cache", "translation")
    ]


def test_text_files_have_the_same_encoding_on_every_system():
    files = files_with_text()
    assert len(files) > 200
    found = {file: opened_without_encoding(file.read_text(encoding="utf-8")) for file in files}
    assert {file: calls for file, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("planted", "is_found"),
    [
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("open(path)", True),
        ("open(path, 'a')", True),
        ("path.open('w')", True),
        ("os.fdopen(3)", True),
        ("tempfile.TemporaryFile('w+')", True),
        ("subprocess.run(words, text=True)", True),
        ("path.read_text(encoding='utf-8')", False),
        ("open(path, 'rb')", False),
        ("path.open('ab')", False),
        ("open(path, mode='wb')", False),
        ("tempfile.TemporaryFile()", False),
        ("subprocess.run(words)", False),
        ("os.open(path, os.O_RDONLY)", False),
    ],
)
def test_a_planted_call_without_an_encoding_is_found(planted, is_found):
    assert bool(opened_without_encoding(planted)) == is_found

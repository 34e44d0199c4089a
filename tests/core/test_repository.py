"""Test file lengths, module names and requirements, and how the `accel-demo` command behaves."""

import re
import subprocess
import sys
from importlib import metadata

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "accel_demo"


def test_train_py_has_at_most_150_lines():
    assert len((PACKAGE / "train.py").read_text().splitlines()) <= 150


def test_no_module_shadows_a_known_package():
    """A train file that is run by its path looks for imports in its own folder first."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    command = "import sys, importlib.util as u; print(*filter(u.find_spec, sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-I", "-c", command, *(names - {"__init__", "__pycache__"})],
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


def test_help_does_not_import_torch():
    code = "import sys, accel_demo.cli as c; sys.argv = ['accel-demo', '--help']\n"
    code += "try: c.main()\nexcept SystemExit: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.endswith("False\n") and "doctor" in result.stdout


def test_closing_the_output_early_causes_no_traceback():
    command = [sys.executable, "-m", "accel_demo.cli", "doctor"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    process.stdout.close()
    with process.stderr:
        assert (process.stderr.read(), process.wait(timeout=60)) == ("", 1)

"""What holds for the files themselves."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "accel_demo"


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_train_py_has_at_most_150_lines():
    assert line_count(PACKAGE / "train.py") <= 150


def test_the_readme_is_short_and_has_one_line_for_each_command():
    """What cog writes does not count: a line added to the loop must not break this."""
    text = (REPOSITORY / "README.md").read_text()
    lines = re.sub(r"(?<!end)\]\]\] -->\n.*?<!-- \[\[\[end", "", text, flags=re.DOTALL).splitlines()
    assert len(lines) <= 80
    assert len([line for line in lines if line.startswith("python -m pip install")]) == 2


def test_no_module_hides_a_known_package():
    """Started by path, a train file has its folder first on sys.path."""
    ours = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    command = "import sys, importlib.util as u; print(*filter(u.find_spec, sys.argv[1:]))"
    found = subprocess.run(
        [sys.executable, "-I", "-c", command, *(ours - {"__init__", "__pycache__"})],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert found.stdout.split() == []
    assert not ours & set(sys.stdlib_module_names)


def test_the_constraints_meet_the_requirements():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    named = {line.split("==")[0] for line in lines if "==" in line}
    required = {re.match(r"[\w-]+", line).group() for line in metadata.requires("accel-demo")}
    assert {"torch", "pytest"} < required
    assert required - {"accel-demo"} <= named


def test_help_needs_no_torch():
    code = "import sys, accel_demo.cli as c; sys.argv = ['accel-demo', '--help']\n"
    code += "try: c.main()\nexcept SystemExit: print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.endswith("False\n") and "doctor" in shown.stdout


def test_a_reader_who_has_seen_enough_gets_no_traceback():
    command = [sys.executable, "-m", "accel_demo.cli", "doctor"]
    shown = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    shown.stdout.close()
    with shown.stderr:
        assert (shown.stderr.read(), shown.wait(timeout=60)) == ("", 1)

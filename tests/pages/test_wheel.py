"""Build the package, install the wheel in a new environment, and work through the course there."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import BIN, REPOSITORY
from tests.pages.test_on_your_script import SCRIPT

pytestmark = pytest.mark.timeout(1500)
SCRIPTS = ("accelerate", "torchrun")
NOT_OURS = re.compile(r"(^|/)(\.page_cache|runs|course/(course|runs)|__pycache__|uv\.lock)(/|$)")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def run(built, tmp_path_factory):
    """A function that runs a command in a new environment, in an empty folder.

    The environment has the wheel, and borrows all other packages from this one.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "environment", with_pip=False)
    bin = folder / "environment" / "bin"
    [wheel] = built.glob("*.whl")
    installing = [sys.executable, "-m", "pip", "--python", bin / "python", "install", "--no-deps"]
    subprocess.run([*installing, "-q", wheel], check=True)
    [packages] = (folder / "environment" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    for name in SCRIPTS:
        shebang, _, rest = (BIN / name).read_text().partition("\n")
        assert shebang.startswith("#!")
        (bin / name).write_text(f"#!{bin / 'python'}\n{rest}")
        (bin / name).chmod(0o755)

    def run(command: str, returncode: int = 0, timeout: float = 600) -> SimpleNamespace:
        left_out = ("PYTHONPATH", "PYTHON_EXEC", "ACCEL_DEMO_STARTER", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment["PATH"] = f"{bin}:{environment['PATH']}"
        cwd = folder / "course" if (folder / "course").exists() else folder
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert result.returncode == returncode, f"{command}\n{result.stdout}\n{result.stderr}"
        return SimpleNamespace(folder=cwd, packages=packages, **vars(result))

    where = run("python -c 'import accel_demo; print(accel_demo.__file__)'").stdout.strip()
    assert Path(where).is_relative_to(packages), f"the clone is used, not the wheel: {where}"
    run("accel-demo init course")
    return run


@pytest.mark.pages
def test_the_wheel_and_the_sdist_have_the_course_and_nothing_that_a_run_has_written(built):
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    course = "accel_demo/course"
    for name in (
        "accel_demo/assets/alice.txt.gz",
        "accel_demo/assets/train-images-idx3-ubyte.gz",
        "accel_demo/py.typed",
        f"{course}/tutorials/10_where_am_i.md",
        f"{course}/tutorials/21_ring.svg",
        f"{course}/tutorials/exercises/10_assert_distributed.py",
        f"{course}/tutorials/exercises/answers/10_assert_distributed.py",
        f"{course}/tutorials/exercises/graders/10.py",
        f"{course}/tutorials/pitfalls/README.md",
        f"{course}/accelerate_configs/cpu.yaml",
    ):
        assert name in names
    assert f"{course}/tutorials/page_tools.py" not in names
    assert not [name for name in names if NOT_OURS.search(name)]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "accel_demo", "tutorials", "tests", "accelerate_configs"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(tracked.stdout.splitlines()) <= inside
    assert not [name for name in inside if NOT_OURS.search(name)]


@pytest.mark.pages
def test_training_in_the_written_course_reaches_88_percent_as_it_stands(run):
    result = run("accelerate launch train.py")
    summary = re.search(r"^done: test accuracy (0\.\d+), .* 1 process on", result.stdout, re.M)
    assert summary and float(summary[1]) >= 0.88, result.stdout
    config = "accelerate_configs/cpu_two_processes.yaml"
    run(f"accelerate launch --config_file {config} train.py --max-steps 5 --run-dir runs/two")
    environment = json.loads((result.folder / "runs/two/environment.json").read_text())
    assert environment["processes"] == 2


@pytest.mark.pages
def test_audit_nodes_and_crash_work_from_the_written_course(run):
    audit = run("accel-demo audit tutorials/13_train.py", returncode=1)
    assert re.search(r"^error: .*\n  tutorials/13_train\.py:\d+", audit.stdout, re.M)
    theirs = "accel-demo audit -- torchrun --standalone --nproc-per-node 2 theirs.py"
    (audit.folder / "theirs.py").write_text(SCRIPT)  # it does not import this package
    assert run(theirs).stdout.startswith("no errors, no warnings\n\nchecked in 2 processes: ")
    wrong = SCRIPT.replace("(model(inputs)", "(model.module(inputs)")
    (audit.folder / "theirs.py").write_text(wrong)
    assert re.search(r"^error: .*\n  theirs\.py:\d+", run(theirs, returncode=1).stdout, re.M)
    nodes = run("accel-demo nodes --processes-per-node 1 -- torchrun tutorials/44_two_machines.py")
    assert "rank 1" in nodes.stdout
    crash = run("accel-demo crash --quick")
    assert " train.py" in crash.stdout and "accel_demo/train.py" not in crash.stdout


@pytest.mark.pages
def test_every_exercise_is_unsolved_at_first_and_three_are_right_with_our_answers(run):
    """The default tests grade all our answers with the same graders, but not from a wheel."""
    numbers = re.findall(r"^\| (\d\d) ", run("accel-demo check").stdout, re.M)
    none = run("accel-demo check --all", returncode=1)
    assert f"0 of {len(numbers)} exercises are right" in none.stdout
    assert none.stdout.count("not started: ") == len(numbers) > 20
    solve(none, "10", "20", "34")
    for number in ("10", "20", "34"):  # these start a launcher, connected and killed processes
        run(f"accel-demo check {number}")
    assert run("accel-demo next").stdout.startswith("main path: 3 of ")


@pytest.mark.slow
def test_every_exercise_is_right_with_our_answer(run):
    numbers = re.findall(r"^\| (\d\d) ", run("accel-demo check").stdout, re.M)
    solve(run("accel-demo reset --help"), *numbers)
    solved = run("accel-demo check --all", timeout=1200)
    assert f"{len(numbers)} of {len(numbers)} exercises are right" in solved.stdout
    assert "There is nothing left to do" in run("accel-demo next").stdout


def solve(course: SimpleNamespace, *numbers: str) -> None:
    """Copy our answers from the wheel to the exercises of the written course."""
    answers = course.packages / "accel_demo/course/tutorials/exercises/answers"
    for number in numbers:
        [answer] = answers.glob(f"{number}_*")
        shutil.copy(answer, course.folder / "tutorials" / "exercises")

"""Test the course that `accel-demo init` writes: its files, links and commands."""

import os
import re
import runpy
import subprocess
import tomllib

import pytest

from accel_demo.lab.course.folder import Course
from tests.conftest import REPOSITORY, run_to_end
from tests.pages.test_tutorials import without_code

TOOLS = runpy.run_path(str(REPOSITORY / "tutorials" / "course.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    Course(folder).update()
    return folder


def test_every_link_in_a_written_course_leads_to_a_file_and_a_heading(folder):
    links = 0
    for page in folder.rglob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", without_code(page)):
            if "://" in target:
                continue
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists() and folder in linked.resolve().parents, f"{page}: {target}"
            if heading:
                titles = re.findall("^#+ (.*)", without_code(linked), re.MULTILINE)
                assert heading in map(TOOLS["anchor"], titles), f"{page}: {target}"
            links += 1
    assert links > 200


def test_no_file_of_a_written_course_has_generator_code_or_paths_of_the_clone(folder):
    for file in folder.rglob("*"):
        if file.suffix not in (".md", ".py", ".yaml") or file.is_relative_to(folder / "source"):
            continue
        text = file.read_text()
        assert not re.search(r"\[\[\[|accel_demo/train|\.\./accel_demo", text), file
        assert file.suffix != ".py" or compile(text, file, "exec")


def test_a_written_course_has_the_files_that_its_commands_name(folder):
    pages = [*folder.glob("tutorials/[0-9]*.md"), *folder.glob("accelerate_configs/*.md")]
    named = 0
    for page in pages:
        text = TOOLS["THEIRS"].sub("", page.read_text())
        blocks = re.findall(r"^```(?:ba)?sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for command in "".join(blocks).replace("\\\n", " ").splitlines():
            command = re.split(r"(?:^|  )#", command)[0]  # without comments, and so without #SBATCH
            for path in re.findall(r"(?<![\w/.])[\w./]+\.(?:py|yaml|txt)\b", command):
                is_written_by_the_command = f"> {path}" in command or "runs/" in path
                is_theirs = path.startswith(("my_", "your_")) or path == "script.py"
                exists = is_written_by_the_command or is_theirs or (folder / path).is_file()
                assert exists, (page.name, command)
                named += 1
    assert named > 80


def test_a_written_course_has_all_of_the_wheel_but_answers_and_graders(folder):
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    command = ["git", "ls-files", "tutorials", "accelerate_configs"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    in_wheel = {
        name
        for name in listed.stdout.splitlines()
        if not any(f"{name}/".startswith(f"{excluded}/") for excluded in wheel["exclude"])
    }
    left_out = {name for name in in_wheel if not (folder / name).is_file()}
    secret = ("tutorials/exercises/answers/", "tutorials/exercises/graders/")
    assert {name for name in left_out if not name.startswith(secret)} == {
        "tutorials/course.yaml",
        "tutorials/exercises/hints.yaml",
    }
    assert len(left_out) > 40
    assert {"train.py", "train_plain.py", "train_dp.py", "train_ddp.py"} <= set(os.listdir(folder))


def test_a_program_of_a_written_course_starts_the_copies_in_this_course(folder):
    program = folder / "tutorials" / "10_where_am_i.py"
    original = program.read_text()
    program.write_text(f"{original}\nprint('changed by the learner')\n")
    try:
        result = run_to_end(["python", "tutorials/10_every_way.py"], cwd=folder)
    finally:
        program.write_text(original)
    assert result.returncode != 0 and "changed by the learner" in result.stderr + result.stdout

"""The original files of the course, and what `accel-demo init` makes of them."""

import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
_CLONE = PACKAGE.parent
# The folder with tutorials/ and accelerate_configs/: the clone, or a part of the installed package
ORIGINALS = _CLONE if (_CLONE / "tutorials" / "course.yaml").is_file() else PACKAGE / "course"
TUTORIALS = ORIGINALS / "tutorials"
EXERCISES = TUTORIALS / "exercises"
CONFIGS = ORIGINALS / "accelerate_configs"
FRONT_PAGE = Path(__file__).with_name("front_page.txt")  # no .md: its links are those of a course
TRAIN_FILES = ("train.py", "train_plain.py", "train_dp.py", "train_ddp.py")
# What only generates or tests the pages, and what would give away the answers
LEFT_OUT = re.compile(
    r"tutorials/(page_tools|translation|command_cache|course|run_notebook|40_record)\.py"
    r"|tutorials/(course|questions|seconds|exercises/hints|zh/translated)\.yaml"
    r"|tutorials/(transcripts|recorder|exercises/answers|exercises/graders)/.*"
    r"|(.*/)?(__pycache__|\.[^/]*)(/.*)?"
)
TEXT = {".md", ".py", ".yaml", ".sh", ".txt"}
COG = re.compile(r"^[ \t]*<!-- \[\[\[(cog.*?|end)\]\]\] -->\n", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(((?:\.\./)+)accel_demo/([\w/.]+)")


def course_files() -> dict[str, bytes]:
    """Return {path in the course's folder: content} for all files that `accel-demo init` writes.

    The train files are in the folder itself, where a reader edits and starts them. Pages have no
    cog comments, and what they link to in the package is in source/.
    """
    files = {"README.md": FRONT_PAGE.read_bytes(), ".gitignore": b"/runs/\n/data/\n__pycache__/\n"}
    for path, name in _originals():
        content = path.read_bytes()
        if path.suffix in TEXT:
            text = content.decode()
            if path.suffix == ".md":
                for _, linked in LINK.findall(with_course_paths(text)):
                    files[f"source/{linked}"] = (PACKAGE / linked).read_bytes()
            content = with_course_paths(text, is_page=path.suffix == ".md").encode()
        files[name] = content
    return files


def _originals() -> Iterator[tuple[Path, str]]:
    """Yield each original and its path in the course's folder."""
    for name in TRAIN_FILES:
        yield PACKAGE / name, name
    for folder in (TUTORIALS, CONFIGS):
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(ORIGINALS).as_posix()
            if path.is_file() and not LEFT_OUT.fullmatch(name):
                yield path, name


def with_course_paths(text: str, is_page: bool = False) -> str:
    """Change the paths of a text to those in the course's folder."""
    text = re.sub(r"accel_demo/(train(_\w+)?\.py)", r"\1", text)
    if is_page:
        text = LINK.sub(r"](\1source/\2", COG.sub("", text))
    return text

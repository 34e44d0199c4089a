"""The train files and launch configs to start: those of a course, or the package's outside one."""

from pathlib import Path

from accel_demo.lab.course.folder import find_course
from accel_demo.lab.course.originals import CONFIGS, PACKAGE


def train_file(script: str) -> str:
    """Return the path of a train file, such as "train" for train.py."""
    course = find_course()
    return _relative((course.folder if course else PACKAGE) / f"{script}.py")


def launch_config(name: str) -> str:
    """Return the path of a launch config, such as "cpu" for cpu.yaml."""
    course = find_course()
    configs = course.folder / "accelerate_configs" if course else CONFIGS
    return _relative(configs / f"{name}.yaml")


def _relative(path: Path) -> str:
    """Return the path relative to the current folder, if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

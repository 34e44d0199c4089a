"""Imports go down one list of layers and never in a circle, imports inside functions included."""

import ast
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# From the top to the bottom: a module may import what stands in its own line or below it.
LAYERS = [
    {"cli"},
    {"lab"},
    {"anatomy"},
    {"show"},
    {"train", "train_plain", "train_dp", "train_ddp"},
    {"results"},
    {"run"},
    {"batches"},
    {"processes"},
    {"optimizer"},
    {"workarounds"},
    {"metrics", "models"},
    {"assets"},  # a script that makes the packaged images
    {"data"},
    {"config"},
    {"errors"},
]
SHARED = "shared by the commands"  # the modules of lab/ that are not in the folder of a command


def modules_of(root: Path) -> dict[str, Path]:
    """Return {name with dots: file} of the package below `root`."""
    names = {}
    for path in (root / "accel_demo").rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(root: Path) -> dict[str, set[str]]:
    """Return {module: the modules of the package that it imports anywhere}."""
    modules = modules_of(root)
    found = {}
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {one if one in modules else node.module for one in full}
        found[name] = {one for one in imported if one in modules and one != name}
    return found


def layer_of(module: str) -> int:
    """Return the line of `LAYERS` in which a module stands; 0 is the top."""
    _, _, rest = module.partition(".")
    (layer,) = [index for index, names in enumerate(LAYERS) if rest.split(".")[0] in names]
    return layer


def folder_of(module: str) -> str:
    """Return the command that a module of lab/ belongs to, or `SHARED`."""
    parts = module.split(".")
    is_package = (REPOSITORY / "accel_demo" / "lab" / parts[2]).is_dir()
    return parts[2] if is_package or parts[2] in ("predict", "check") else SHARED


def violations(root: Path) -> list[str]:
    """Return a line for each import that goes up, or from one command to another."""
    lines = []
    for module, imported in imports_of(root).items():
        for other in imported - {"accel_demo"}:
            if layer_of(other) < layer_of(module):
                lines.append(f"{module} imports {other}, which is above it")
            if ".lab." in module and ".lab." in other:
                ours, theirs = folder_of(module), folder_of(other)
                if theirs not in (ours, SHARED):
                    lines.append(f"{module} imports {other}, which belongs to {theirs}")
    return lines


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle of imports, in order; an empty list if there is none."""
    finished: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in finished:
            return []
        for other in sorted(imports[module]):
            if found := search(other, [*path, module]):
                return found
        finished.add(module)
        return []

    for module in sorted(imports):
        if found := search(module, []):
            return found
    return []


def test_imports_go_down_and_never_in_a_circle():
    assert violations(REPOSITORY) == []
    assert circle(imports_of(REPOSITORY)) == []


@pytest.mark.parametrize("indent", ["", "def later():\n    "])
@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("config.py", "from accel_demo.data import ImageSet", "accel_demo.data, which is above it"),
        ("errors.py", "import accel_demo.lab.machine", "accel_demo.lab.machine, which is above"),
        (
            "lab/crash/command.py",
            "from accel_demo.lab.timeline import merge",
            "accel_demo.lab.timeline.merge, which belongs to timeline",
        ),
    ],
)
def test_a_planted_import_that_goes_up_is_found(file, line, said, indent, tmp_path):
    planted(tmp_path, file, indent + line)
    (found,) = violations(tmp_path)
    assert said in found


@pytest.mark.parametrize("indent", ["", "def later():\n    "])
def test_a_planted_circle_is_found(indent, tmp_path):
    planted(tmp_path, "run/progress.py", indent + "from accel_demo.run import checkpoint")
    assert set(circle(imports_of(tmp_path))) >= {
        "accel_demo.run.checkpoint",
        "accel_demo.run.progress",
    }


def planted(folder: Path, file: str, lines: str) -> None:
    """Copy the package's Python files into `folder`, with `lines` at the end of one of them."""
    for path in modules_of(REPOSITORY).values():
        copy = folder / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    with (folder / "accel_demo" / file).open("a") as target:
        target.write(f"\n{lines}\n")

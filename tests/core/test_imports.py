"""The order of imports, those inside functions included, and who may start a process."""

import ast
from pathlib import Path

import pytest

from accel_demo.cli import COMMANDS
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
    {"errors", "wording"},
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
        for one in [*imported, name]:  # an import also runs every package above the module
            imported |= packages_above(one)
        found[name] = {one for one in imported if one in modules and one != name}
    return found


def packages_above(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def layer_of(module: str) -> int:
    """Return the line of `LAYERS` in which a module stands; 0 is the top."""
    _, _, rest = module.partition(".")
    layers = [index for index, names in enumerate(LAYERS) if rest.split(".")[0] in names]
    assert len(layers) == 1, f"{module} is in {len(layers)} lines of LAYERS instead of in one"
    return layers[0]


def is_in_lab(module: str) -> bool:
    return module.split(".")[1] == "lab"


def folder_of(module: str) -> str:
    """Return the command that a module of lab/ belongs to, or `SHARED`."""
    _, _, name, *_ = [*module.split("."), ""]
    return name if name in COMMANDS else SHARED


def violations(root: Path) -> list[str]:
    """Return a line for each import that goes up, or from one command to another."""
    lines = []
    for module, imported in imports_of(root).items():
        for other in imported - {"accel_demo"}:
            if layer_of(other) < layer_of(module):
                lines.append(f"{module} imports {other}, which is above it")
            if is_in_lab(module) and is_in_lab(other):
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
            "from accel_demo.lab.timeline.merge import merge",
            "accel_demo.lab.timeline.merge, which belongs to timeline",
        ),
        (
            "lab/__init__.py",
            "from accel_demo.lab.predict import main",
            "accel_demo.lab.predict, which belongs to predict",
        ),
    ],
)
def test_a_planted_import_that_goes_up_is_found(file, line, said, indent, tmp_path):
    planted(tmp_path, file, indent + line)
    found = violations(tmp_path)
    assert found and any(said in line for line in found), found


@pytest.mark.parametrize("indent", ["", "def later():\n    "])
@pytest.mark.parametrize(
    ("file", "line", "members"),
    [
        ("run/progress.py", "import accel_demo.run.checkpoint", {"run.checkpoint", "run.progress"}),
        ("run/__init__.py", "from accel_demo.run.run import Run", {"run", "run.run"}),
    ],
)
def test_a_planted_circle_is_found(file, line, members, indent, tmp_path):
    planted(tmp_path, file, indent + line)
    assert set(circle(imports_of(tmp_path))) >= {f"accel_demo.{name}" for name in members}


def planted(folder: Path, file: str, lines: str) -> None:
    """Copy the package's Python files into `folder`, with `lines` at the end of one of them."""
    for path in modules_of(REPOSITORY).values():
        copy = folder / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    with (folder / "accel_demo" / file).open("a") as target:
        target.write(f"\n{lines}\n")


STARTING = {"Popen", "check_output", "check_call", "fork", "execv", "system", "start_processes"}
STARTING |= {"ProcessPoolExecutor", "subprocess.run", "subprocess.call"}
# What starts a process without `launch.spawn`, `launch.run_to_end` or `launch.start`, and why.
STARTS_ITSELF = {
    "processes.fork_server": "launch.start asks this server",
    "processes.fork_server_main": "it is the server",
    "processes.forked_python": "it becomes the real Python if the server refuses",
    "anatomy.devices": "measures the memory of a process that is not forked",
    "anatomy.gil": "compares a pool of processes with a pool of threads",
    "anatomy.kernel_distance.costs": "measures in a pool of one process",
    "lab.bench.precision": "measures in a pool of one process",
}


def starts_a_process(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in STARTING or name.rpartition(".")[2] in STARTING:
                return True
    return False


def test_one_module_starts_processes_and_the_exceptions_are_known():
    modules = modules_of(REPOSITORY)
    found = {name for name, path in modules.items() if starts_a_process(path)}
    assert found == {f"accel_demo.{name}" for name in ["processes.launch", *STARTS_ITSELF]}

"""Test which modules may import each other, and which modules may start processes."""

import ast
import re
from pathlib import Path

import pytest

from accel_demo.cli import COMMANDS
from tests.conftest import REPOSITORY

# The layers, from top to bottom. A module may import modules from its own line and lines below it.
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
    {"metrics", "models"},
    {"assets"},  # a script that creates the packaged images
    {"data"},
    {"config"},
    {"options"},
    {"errors", "guess", "wording", "files"},
]
SHARED = "shared by the commands"  # the modules of lab/ that several commands use


def modules_of(root: Path) -> dict[str, Path]:
    """Map the module names of the package in `root` to their files."""
    names = {}
    for path in (root / "accel_demo").rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(root: Path) -> dict[str, set[str]]:
    """Map each module to the package's modules that it imports, at the top or in functions."""
    modules = modules_of(root)
    imports = {}
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                full_names = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {
                    full_name if full_name in modules else node.module for full_name in full_names
                }
        for module in [*imported, name]:  # importing a module also imports its parent packages
            imported |= packages_above(module)
        imports[name] = {module for module in imported if module in modules and module != name}
    return imports


def packages_above(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def layer_of(module: str) -> int:
    """Return the index of the module's line in `LAYERS`. The top line has index 0."""
    _, _, rest = module.partition(".")
    layers = [index for index, names in enumerate(LAYERS) if rest.split(".")[0] in names]
    assert len(layers) == 1, f"{module} is in {len(layers)} lines of LAYERS instead of one"
    return layers[0]


def is_in_lab(module: str) -> bool:
    return module.split(".")[1] == "lab"


def folder_of(module: str) -> str:
    """Return the command that a module of lab/ belongs to, or `SHARED`."""
    _, _, name, *_ = [*module.split("."), ""]
    return name if name in COMMANDS else SHARED


def violations(root: Path) -> list[str]:
    """Return a message for each import from a higher layer or from another command's folder."""
    lines = []
    for module, imported in imports_of(root).items():
        for other in imported - {"accel_demo"}:
            if layer_of(other) < layer_of(module):
                lines.append(f"{module} imports {other}, which is above it")
            if is_in_lab(module) and is_in_lab(other):
                command, other_command = folder_of(module), folder_of(other)
                if other_command not in (command, SHARED):
                    lines.append(f"{module} imports {other}, which belongs to {other_command}")
    return lines


def import_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, in order, or an empty list if there is none."""
    finished: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in finished:
            return []
        for other in sorted(imports[module]):
            if cycle := search(other, [*path, module]):
                return cycle
        finished.add(module)
        return []

    for module in sorted(imports):
        if cycle := search(module, []):
            return cycle
    return []


def test_imports_point_to_lower_layers_and_have_no_cycles():
    assert violations(REPOSITORY) == []
    assert import_cycle(imports_of(REPOSITORY)) == []


def test_no_module_of_the_package_imports_a_benchmark():
    scripts = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}
    pattern = re.compile(rf"^\s*(import|from) ({'|'.join(scripts)}|benchmarks)\b", re.MULTILINE)
    assert pattern.search("    from measuring import train") and "accuracy" in scripts
    for name, path in modules_of(REPOSITORY).items():
        assert not pattern.search(path.read_text()), name


@pytest.mark.parametrize("indent", ["", "def later():\n    "])
@pytest.mark.parametrize(
    ("file", "line", "message"),
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
def test_a_forbidden_import_is_reported(file, line, message, indent, tmp_path):
    copy_and_append(tmp_path, file, indent + line)
    messages = violations(tmp_path)
    assert messages and any(message in line for line in messages), messages


@pytest.mark.parametrize("indent", ["", "def later():\n    "])
@pytest.mark.parametrize(
    ("file", "line", "members"),
    [
        ("run/progress.py", "import accel_demo.run.checkpoint", {"run.checkpoint", "run.progress"}),
        ("run/__init__.py", "from accel_demo.run.run import Run", {"run", "run.run"}),
    ],
)
def test_an_import_cycle_is_found(file, line, members, indent, tmp_path):
    copy_and_append(tmp_path, file, indent + line)
    assert set(import_cycle(imports_of(tmp_path))) >= {f"accel_demo.{name}" for name in members}


def copy_and_append(folder: Path, file: str, lines: str) -> None:
    """Copy the package's Python files into `folder`, and append `lines` to `file`."""
    for path in modules_of(REPOSITORY).values():
        copy = folder / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    with (folder / "accel_demo" / file).open("a") as target:
        target.write(f"\n{lines}\n")


TRAIN_FILE = re.compile(r"\btrain(_plain|_dp|_ddp|\.py)\b")


def test_the_modules_below_the_train_files_do_not_mention_them():
    modules = {name: path for name, path in modules_of(REPOSITORY).items() if "." in name}
    train_files = layer_of("accel_demo.train")
    below = {name: path for name, path in modules.items() if layer_of(name) > train_files}
    assert len(below) > 30
    assert [name for name, path in below.items() if TRAIN_FILE.search(path.read_text())] == []
    assert TRAIN_FILE.search(modules["accel_demo.train_dp"].read_text())


# Functions and classes that start a process or replace this one, by the last part of their name
STARTING = {
    "Popen",
    "popen",
    "system",
    "getoutput",
    "getstatusoutput",
    "check_output",
    "check_call",
}
STARTING |= {"fork", "forkpty", "posix_spawn", "posix_spawnp", "fork_exec", "startfile", "openpty"}
STARTING |= {"Pool", "ProcessPoolExecutor", "Process", "Manager", "start_processes"}
STARTING |= {"create_subprocess_exec", "create_subprocess_shell"}
STARTING |= {
    f"{kind}{how}" for kind in ("exec", "spawn") for how in "l le lp lpe v ve vp vpe".split()
}
# Functions whose last name is common, by all of it
STARTING |= {"subprocess.run", "subprocess.call", "mp.spawn", "multiprocessing.spawn", "pty.spawn"}
FOREIGN = {"os", "subprocess", "multiprocessing", "torch.multiprocessing", "pty"}
NOT_STARTING = {"psutil.Process"}  # a handle to a process that runs already
# The modules that start processes without `spawn`, `run_to_end` or `start` from launch.py, and why.
STARTS_ITSELF = {
    "anatomy.gil": "compares a pool of processes with a pool of threads",
    "anatomy.kernel_distance.costs": "runs its measurements in a pool of one process",
    "lab.bench.precision": "runs its measurements in a pool of one process",
    "lab.nodes.keeper": "starts commands as children of process 1 of a namespace",
    "lab.nodes.node": "passes a pipe to the keeper of a node, and reads what it prints as bytes",
}


def starts_a_process(source: str) -> bool:
    """Return True if the code calls a function that starts a process, or imports its bare name.

    A function that is called under a different name is not seen.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            parts = name.split(".")
            ends = {parts[-1], ".".join(parts[-2:])}
            if ends & STARTING and name not in NOT_STARTING:
                return True
        if isinstance(node, ast.ImportFrom) and node.module in FOREIGN:
            package = node.module.rpartition(".")[2]
            if any(f"{package}.{alias.name}" in STARTING for alias in node.names):
                return True
    return False


def test_only_launch_and_the_listed_modules_start_processes():
    modules = modules_of(REPOSITORY)
    starters = {name for name, path in modules.items() if starts_a_process(path.read_text())}
    assert starters == {f"accel_demo.{name}" for name in ["processes.launch", *STARTS_ITSELF]}


@pytest.mark.parametrize(
    "planted",
    [
        "os.fork()",
        "pid = os.posix_spawn(words[0], words, environment)",
        "os.execvpe(words[0], words, environment)",
        "os.spawnv(os.P_NOWAIT, words[0], words)",
        "os.system('ls')",
        "pty.spawn('sh')",
        "subprocess.run(words)",
        "from subprocess import run\nrun(words)",
        "subprocess.getoutput('ls')",
        "psutil.Popen(words)",
        "multiprocessing.Process(target=print).start()",
        "multiprocessing.get_context('spawn').Pool(2)",
        "torch.multiprocessing.spawn(train, nprocs=2)",
        "import torch.multiprocessing as mp\nmp.spawn(train, nprocs=2)",
        "concurrent.futures.ProcessPoolExecutor(2)",
        "asyncio.create_subprocess_exec('ls')",
    ],
)
def test_a_planted_start_of_a_process_is_found(planted):
    assert starts_a_process(planted)


def test_our_own_ways_to_start_processes_are_not_reported():
    assert not starts_a_process("launch.spawn(train, 2)\npsutil.Process(pid).children()")


def test_no_two_classes_of_the_package_have_the_same_name():
    names = [
        node.name
        for path in modules_of(REPOSITORY).values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))

"""Test which modules may import each other, and which modules may start processes."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from sys import stdlib_module_names

import pytest

from accel_demo.cli import COMMANDS
from tests.conftest import REPOSITORY

# The layers, from top to bottom. A module may import modules from its own line and lines below it.
LAYERS = [
    {"cli", "__main__"},
    {"completion"},
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
    {"tiny_gpt"},
    {"assets"},  # scripts that create the packaged images and text
    {"data"},
    {"text"},
    {"config"},
    {"options"},
    {"progress_bar"},
    {"errors", "guess", "wording", "suggestions", "missing_characters"},
    {"files", "typed_json", "slow_imports", "terminal", "observer"},
]
SHARED = "shared by the commands"  # the modules of lab/ that several commands use


@cache
def sources() -> dict[str, str]:
    """Map the names of the package's modules to their code."""
    code = {}
    for path in (REPOSITORY / "accel_demo").rglob("*.py"):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        code[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return code


tree_of = cache(ast.parse)


def imports_of(modules: dict[str, str]) -> dict[str, set[str]]:
    """Map each module to the package's modules that it imports, at the top or in functions."""
    imports = {}
    for name, source in modules.items():
        imported = set()
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                # The observer is loaded under another name by a Python without accel_demo.
                is_allowed = node.level == 1 and name.startswith("accel_demo.observer.")
                assert node.level == 0 or is_allowed, f"{name} has a relative import"
                module = node.module or ""
                if node.level:
                    module = f"accel_demo.observer.{module}".rstrip(".")
                full_names = {f"{module}.{alias.name}" for alias in node.names}
                imported |= {
                    full_name if full_name in modules else module for full_name in full_names
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


def folder_of(module: str) -> str:
    """Return the command that a module of lab/ belongs to, or `SHARED`."""
    _, _, name, *_ = [*module.split("."), ""]
    return name if name in COMMANDS else SHARED


def violations(imports: dict[str, set[str]]) -> list[str]:
    """Return a message for each import from a higher layer or from another command's folder."""
    lines = []
    for module, imported in imports.items():
        for other in imported - {"accel_demo"}:
            if layer_of(other) < layer_of(module):
                lines.append(f"{module} imports {other}, which is above it")
            if module.startswith("accel_demo.lab") and other.startswith("accel_demo.lab"):
                command, other_command = folder_of(module), folder_of(other)
                if other_command not in (command, SHARED):
                    lines.append(f"{module} imports {other}, which belongs to {other_command}")
    return lines


def import_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, in order, or an empty list if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_point_to_lower_layers_and_have_no_cycles():
    assert violations(imports_of(sources())) == []
    assert import_cycle(imports_of(sources())) == []


def test_the_observer_imports_only_the_standard_library_and_itself():
    """It runs in the reader's Python before torch is imported, perhaps without accel_demo."""
    for name, source in sources().items():
        if name.startswith("accel_demo.observer"):
            for node in tree_of(source).body:
                if isinstance(node, ast.Import):
                    assert {alias.name.split(".")[0] for alias in node.names} <= stdlib_module_names
                if isinstance(node, ast.ImportFrom):
                    assert node.level or node.module.split(".")[0] in stdlib_module_names, name


def imports_with(module: str, line: str) -> dict[str, set[str]]:
    """Return the imports of the package as if `line` were at the end of the module."""
    return imports_of({**sources(), module: f"{sources()[module]}\n{line}\n"})


def test_no_module_of_the_package_imports_a_benchmark():
    scripts = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}
    pattern = re.compile(rf"^\s*(import|from) ({'|'.join(scripts)}|benchmarks)\b", re.MULTILINE)
    assert pattern.search("    from measuring import train") and "accuracy" in scripts
    for name, source in sources().items():
        assert not pattern.search(source), name


@pytest.mark.parametrize("indent", ["", "def later():\n    "])
@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        ("config", "from accel_demo.data import ImageSet", "accel_demo.data, which is above it"),
        ("errors", "import accel_demo.lab.machine", "accel_demo.lab.machine, which is above"),
        (
            "lab.crash.command",
            "from accel_demo.lab.timeline.merge import merge",
            "accel_demo.lab.timeline.merge, which belongs to timeline",
        ),
        (
            "lab",
            "from accel_demo.lab.predict import main",
            "accel_demo.lab.predict, which belongs to predict",
        ),
    ],
)
def test_a_forbidden_import_is_reported(module, line, message, indent):
    messages = violations(imports_with(f"accel_demo.{module}", indent + line))
    assert messages and any(message in line for line in messages), messages


@pytest.mark.parametrize("indent", ["", "def later():\n    "])
@pytest.mark.parametrize(
    ("module", "line", "members"),
    [
        ("run.progress", "import accel_demo.run.checkpoint", {"run.checkpoint", "run.progress"}),
        ("run", "from accel_demo.run.run import Run", {"run", "run.run"}),
    ],
)
def test_an_import_cycle_is_found(module, line, members, indent):
    cycle = import_cycle(imports_with(f"accel_demo.{module}", indent + line))
    assert set(cycle) >= {f"accel_demo.{name}" for name in members}


TRAIN_FILE = re.compile(r"\btrain(_plain|_dp|_ddp|\.py)\b")


def test_the_modules_below_the_train_files_do_not_mention_them():
    train_files = layer_of("accel_demo.train")
    modules = {name: source for name, source in sources().items() if "." in name}
    below = {name: source for name, source in modules.items() if layer_of(name) > train_files}
    assert len(below) > 30
    assert [name for name, source in below.items() if TRAIN_FILE.search(source)] == []
    assert TRAIN_FILE.search(modules["accel_demo.train_dp"])


# Functions and classes that start a process or replace this one, by the end of their name
STARTING = re.compile(
    r"\b(fork|forkpty|fork_exec|posix_spawnp?|exec[lv]p?e?|spawn[lv]p?e?|startfile|openpty|system"
    r"|popen|Popen|getoutput|getstatusoutput|check_output|check_call|subprocess\.(run|call)"
    r"|Pool|ProcessPoolExecutor|(?<!psutil\.)Process|Manager|start_processes"
    r"|(mp|multiprocessing|pty)\.spawn|create_subprocess_(exec|shell))$"
)
# The modules that start processes without `spawn`, `run_to_end` or `start` from launch.py, and why.
STARTS_ITSELF = {
    "anatomy.gil": "compares a pool of processes with a pool of threads",
    "lab.nodes.keeper": "starts commands as children of process 1 of a namespace",
    "lab.nodes.node": "passes a pipe to the keeper of a node, and reads what it prints as bytes",
}


def starts_a_process(source: str) -> bool:
    """Return True if the code calls or imports a function that starts a process.

    A function that is called under a different name is not seen.
    """
    names = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Call):
            names.append(ast.unparse(node.func))
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(map(STARTING.search, names))


def test_only_launch_and_the_listed_modules_start_processes():
    starters = {name for name, source in sources().items() if starts_a_process(source)}
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
        for source in sources().values()
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))

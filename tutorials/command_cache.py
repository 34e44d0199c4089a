"""Run the commands of the pages, or reuse their stored output if nothing has changed.

The output of a command is stored in `.page_cache/`. It is reused only if nothing has changed since
then: neither the contents of the files that the command's processes read (`recorder/` logs the file
names; a file that was missing must still be missing), nor the `_facts` about the repository and the
machine. In case of doubt, the command runs again: nothing is stored if the command fails, if a file
changes after the command has read it, or if the command is, or starts, a program other than Python,
because such a program does not record its files. Only an audit is stored without a log, because its
observer would take the recorder for a part of the script: its output depends on the package and on
the scripts that its command names.

The recorder misses two kinds of files: files that compiled code opens (no command of the pages
opens a file of the repository this way), and files outside the repository that a program only
checks for existence. Use `--force` after you change such a file.
"""

import functools
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil

from accel_demo.files import write_whole
from accel_demo.processes import cleanup, launch
from accel_demo.processes import environment as variables_of_launchers
from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.processes.launch import STARTER, run_to_end

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support import fork_client, fork_server

REPOSITORY = Path(__file__).resolve().parent.parent
STORE = REPOSITORY / ".page_cache"
FORCE = "ACCEL_DEMO_FORCE"  # if this variable is not empty, every command runs
RECORDER = Path(__file__).resolve().parent / "recorder"
TIME_LIMIT = 300  # seconds per command
PYTHON_PROGRAMS = ("python", "accelerate", "torchrun", "accel-demo")
AUDIT = "accel-demo audit "
READ_BY_LIBRARIES = tuple(
    "ACCEL_DEMO_START_METHOD ACCELERATE COLUMNS FSDP GLOO HOME NCCL TORCH".split()
    + fork_server.READ_AT_START
)
NOT_COUNTED = ("build", "dist", "runs", "tests", "__pycache__")  # no page depends on these folders


@functools.cache
def result_of(command: str, returncode: int = 0, draws: bool = False) -> dict[str, str]:
    """Run the command, or reuse its stored result. Return {"output": text}.

    If `draws` is true, the result also has "drawn", the SVG text. Raises `RuntimeError` if the exit
    code is not `returncode`. If the command runs, print its duration and the reason on stderr.
    """
    request = {"command": command, "returncode": returncode, "draws": draws}
    file = STORE / f"{_sha256(json.dumps(request).encode())[:16]}.json"
    stored = _load(file)
    facts = _facts()
    reason = "forced" if os.environ.get(FORCE) else _reason_to_run(stored, facts)
    if reason is None:
        return stored["result"]
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="pages-") as folder:
        picture = Path(folder, "drawn.svg")
        ended = _run(f"{command} --plot {picture}" if draws else command, folder)
        if ended.returncode != returncode:
            problem = f"ended with {ended.returncode}, not {returncode}"
            raise RuntimeError(f"{command}\n{problem}\n{ended.stdout}\n{ended.stderr}")
        result = {"output": ended.stdout.rstrip()}
        if draws:
            result["drawn"] = picture.read_text(encoding="utf-8")
    print(f"{time.time() - started:7.1f} s  $ {command}  ({reason})", file=sys.stderr, flush=True)
    files = _digests(command, ended.record, started)
    if files is not None:
        _save(file, {**request, "facts": facts, "files": files, "result": result})
    return result


def _run(command: str, folder: str) -> SimpleNamespace:
    """Run a command of a page. Return its returncode, stdout, stderr and the recorder's log.

    The log and the temporary files of the command are written to `folder`.
    """
    log = Path(folder, "record")
    # The recorder records nothing without a log. The fork server's programs have the same path.
    variables = {"TMPDIR": folder, "PYTHONPATH": _python_path()}
    if not command.startswith(AUDIT):
        variables |= {"ACCEL_DEMO_RECORD": str(log)}
    ended = run_to_end(command, TIME_LIMIT, cwd=REPOSITORY, **variables)
    ended.record = os.fsdecode(log.read_bytes()) if log.exists() else ""
    return ended


@contextmanager
def forking(is_wanted: bool) -> Iterator[None]:
    """Fork the commands from a server that has imported torch, or start them normally."""
    for name in (STARTER, "PYTHON_EXEC"):  # both are set if a fork server started this program
        os.environ.pop(name, None)
    if not is_wanted:
        yield
        return
    environment = environment_for({**QUIET, "PYTHONPATH": _python_path()})
    with closing(fork_server.ForkServer(environment)) as server:
        os.environ.update(server.variables)
        yield


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")]))


def _reason_to_run(stored: dict | None, facts: dict) -> str | None:
    """Return the reason to run the command, or None if its stored result is still valid.

    The result of a command that was started normally is valid for forked commands, too.
    """
    if stored is None:
        return "not stored"
    for name in facts:
        was_started_normally = name == "forked" and stored["facts"].get(name) is False
        if stored["facts"].get(name) != facts[name] and not was_started_normally:
            return f"changed: {name}"
    for path, digest in stored["files"].items():
        if _digest(REPOSITORY / path) != digest:
            return f"changed: {path}"
    return None


@functools.cache
def _facts() -> dict:
    """Return everything that commands may depend on, except the contents of the files they read.

    A new file might be imported or found instead of an existing one, so the names of all files are
    a fact, except those of tests, pages and pictures. The facts are collected once, before the
    first command runs. If a file is added while commands run, the results stored by this run will
    therefore not be reused.
    """
    starting = (launch, variables_of_launchers, cleanup, fork_server, fork_client)
    files = (__file__, RECORDER / "sitecustomize.py", *(module.__file__ for module in starting))
    packages = {f"{package.name} {package.version}" for package in metadata.distributions()}
    environment = environment_for(QUIET).items()
    libraries = {name: value for name, value in environment if name.startswith(READ_BY_LIBRARIES)}
    return {
        "names of the files": _sha256("\n".join(sorted(_names(REPOSITORY))).encode()),
        "packages": sorted(packages),
        "Python": sys.version,
        "processor": _processor(),
        "environment": libraries,
        "forked": STARTER in os.environ,
        "how commands are run": [_digest(Path(file)) for file in files],
    }


def _names(folder: Path) -> list[str]:
    names = []
    for entry in os.scandir(folder):
        if entry.name.startswith(".") or entry.name in NOT_COUNTED:
            continue
        if Path(entry) == REPOSITORY / "course":  # the reader's, from `accel-demo init`
            continue
        if entry.is_dir():
            names += _names(Path(entry))
        elif not entry.name.endswith((".md", ".svg")):
            names.append(os.path.relpath(entry, REPOSITORY))
    return names


def _processor() -> list:
    """Return the properties of the machine that may affect the last bits of a result."""
    described = set()
    with suppress(OSError):  # the file exists only on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        described = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    described.update(map(str, Path("/proc/driver/nvidia/gpus").glob("*")))
    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 0
    return [platform.system(), platform.machine(), os.cpu_count(), cores, *sorted(described)]


def _digests(command: str, record: str, started: float) -> dict[str, str] | None:
    """Return the SHA-256 of each file in the recorder's log, or None if the log is not reliable.

    It is reliable if every program recorded its files, and no file has changed since `started`.
    """
    lines = set(filter(None, record.split("\0")))
    if command.startswith(AUDIT):
        lines = {str(REPOSITORY / word) for word in shlex.split(command) if word.endswith(".py")}
        package = [path for path in REPOSITORY.glob("accel_demo/**/*") if path.is_file()]
        lines |= {str(path) for path in package if path.suffix not in (".md", ".pyc")}
    if shlex.split(command)[0] not in PYTHON_PROGRAMS or not lines:
        return None
    digests = {}
    for line in sorted(lines):
        if line.startswith("!"):  # a program whose files are not recorded
            return None
        path = Path(line)
        if path.suffix == ".pyc":  # Python updates it, so check only its source file
            with suppress(ValueError):
                path = Path(importlib.util.source_from_cache(line))
        with suppress(OSError):
            if path.stat().st_ctime >= started:
                return None
        name = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
        digests[str(name)] = _digest(path)
    return digests


def _digest(path: Path) -> str:
    if not path.is_file():
        return "missing" if not path.exists() else "not a file"
    return _sha256(path.read_bytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _load(file: Path) -> dict | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _save(file: Path, content: dict) -> None:
    """Write the file completely or not at all, even if this process is killed."""
    STORE.mkdir(exist_ok=True)
    write_whole(file, json.dumps(content, indent=1))

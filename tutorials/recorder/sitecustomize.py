"""Write the name of every file that a Python program reads to a log.

`command_cache.py` puts this folder on PYTHONPATH, and Python imports a module of this name when it
starts. So every Python process that the program starts also records, and a forked process keeps the
hook of its parent. A name is logged before the file is opened, so the log of a process that is
killed is complete.
"""

import os
import site
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

LOG = "ACCEL_DEMO_RECORD"  # this variable names the log; without it, nothing is recorded
# Installed libraries: `command_cache.py` compares their versions instead. /proc, /sys and /dev
# contain no real files.
LIBRARIES = [os.path.dirname(os.__file__), *site.getsitepackages(), site.getusersitepackages()]
NOT_RECORDED = tuple(f"{folder}{os.sep}" for folder in [*LIBRARIES, "/proc", "/sys", "/dev"])
STARTS = ("os.spawn", "os.startfile", "os.system", "pty.spawn")  # their programs do not record
OUR_PROGRAMS = ("python", "accelerate", "torchrun", "accel-demo")  # prefixes, as in python3.11
# Libraries start these to inspect the machine. They read none of our files.
ABOUT_THE_MACHINE = ("ldconfig", "nvidia-smi", "uname")

log = temporary_files = None  # the run's temporary files are in the folder of the log
recorded, read_before = set(), set()


def hook(event: str, arguments: tuple) -> None:
    """Record an audit event of Python. Source: https://docs.python.org/3/library/sys.html"""
    if event == "open":
        path, _, flags = arguments
        is_number = isinstance(path, int)  # of a file that is already open
        if not is_number and flags & (os.O_WRONLY | os.O_RDWR) != os.O_WRONLY:
            record_file(os.path.abspath(os.fsdecode(path)))
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        program, words, *_, environment = arguments  # Popen also passes the working directory
        if not records_too(program, words, environment):
            record(f"!{program}")
    elif event in STARTS:
        record(f"!{arguments[0]}")


def record_file(path: str) -> None:
    if not path.startswith(NOT_RECORDED):
        record(path)


def record(line: str) -> None:
    if os.environ.get(LOG, log) != log:  # new process, or forked for a new command
        begin_log()
    if log is None:  # in the fork server, which imports libraries before any command
        read_before.add(line)
    elif line not in recorded and not f"{line}{os.sep}".startswith(temporary_files):
        recorded.add(line)
        write(line)


def begin_log() -> None:
    """Set the log, and record what this process read before: earlier files, and its modules."""
    global log, temporary_files
    log = os.environ[LOG]
    temporary_files = f"{os.path.dirname(log)}{os.sep}"
    recorded.clear()
    for line in read_before:
        record(line)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and os.path.isabs(file):  # torch sets it to "_ops.py" in one module
            record_file(file)


def write(line: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # appending is atomic
    try:
        os.write(file, os.fsencode(line) + b"\0")
    finally:
        os.close(file)


def records_too(program, arguments, environment) -> bool:
    """Return True if a new process records what it reads: a Python program that loads this hook."""
    environment = os.environ if environment is None else environment
    name = os.path.basename(os.fsdecode(program))
    if name in ABOUT_THE_MACHINE:
        return True
    if not name.startswith(OUR_PROGRAMS):
        return False
    for flag in map(os.fsdecode, list(arguments)[1:]):
        if not flag.startswith("-") or flag in ("-c", "-m"):
            break
        if set("EIS") & set(flag):  # Python then ignores PYTHONPATH or sitecustomize
            return False
    names = (LOG, "PYTHONPATH")
    return all(environment.get(name) == os.environ.get(name) for name in names)


def import_next() -> None:
    """Import the `sitecustomize` that Python would import without this folder."""
    sys.path.remove(os.path.dirname(__file__))
    if spec := PathFinder.find_spec("sitecustomize"):
        spec.loader.exec_module(module_from_spec(spec))


sys.addaudithook(hook)
import_next()

"""Write the name of every file that a Python program reads to a log.

`command_cache.py` puts this folder on PYTHONPATH, and Python imports a module of this name when it
starts. So every Python process that the program starts records too, and a forked process goes on
with the hook of its parent. A name is in the log before its file is open: a process that is killed
has recorded all it has read.
"""

import os
import site
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

LOG = "ACCEL_DEMO_RECORD"  # the variable with the name of the log; nothing is recorded without it
# Installed libraries: `command_cache.py` compares their versions instead. The rest are no files.
LIBRARIES = [os.path.dirname(os.__file__), *site.getsitepackages(), site.getusersitepackages()]
NOT_RECORDED = tuple(f"{folder}{os.sep}" for folder in [*LIBRARIES, "/proc", "/sys", "/dev"])
STARTS = ("os.spawn", "os.startfile", "os.system", "pty.spawn")  # whatever they start
OUR_PROGRAMS = ("python", "accelerate", "torchrun", "accel-demo")  # "python" is python3.11 too
# Libraries start these to learn about the machine. They read none of our files.
ABOUT_THE_MACHINE = ("ldconfig", "nvidia-smi", "uname")

log = temporary_files = None  # beside the log are the temporary files of the run
recorded, read_before = set(), set()


def hook(event: str, arguments: tuple) -> None:
    """Python calls this for each of its audit events: https://docs.python.org/3/library/sys.html"""
    if event == "open":
        path, _, flags = arguments
        is_number = isinstance(path, int)  # of a file that is open already
        if not is_number and flags & (os.O_WRONLY | os.O_RDWR) != os.O_WRONLY:
            record_file(os.path.abspath(os.fsdecode(path)))
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        program, words, *_, environment = arguments  # Popen has the working directory between them
        if not records_too(program, words, environment):
            record(f"!{program}")
    elif event in STARTS:
        record(f"!{arguments[0]}")


def record_file(path: str) -> None:
    if not path.startswith(NOT_RECORDED):
        record(path)


def record(line: str) -> None:
    if os.environ.get(LOG, log) != log:  # this process begins, or was forked to run a new command
        begin_log()
    if log is None:  # the fork server, which imports libraries before there is a command
        read_before.add(line)
    elif line not in recorded and not f"{line}{os.sep}".startswith(temporary_files):
        recorded.add(line)
        write(line)


def begin_log() -> None:
    """Record what this process has read before there was a log: its modules and their files."""
    global log, temporary_files
    log = os.environ[LOG]
    temporary_files = f"{os.path.dirname(log)}{os.sep}"
    recorded.clear()
    for line in read_before:
        record(line)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and os.path.isabs(file):  # torch calls one of its modules "_ops.py"
            record_file(file)


def write(line: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # appending is atomic
    try:
        os.write(file, os.fsencode(line) + b"\0")
    finally:
        os.close(file)


def records_too(program, arguments, environment) -> bool:
    """Whether all that a new process reads is recorded: it is a Python program, with this hook."""
    environment = os.environ if environment is None else environment
    name = os.path.basename(os.fsdecode(program))
    if name in ABOUT_THE_MACHINE:
        return True
    if not name.startswith(OUR_PROGRAMS):
        return False
    for flag in map(os.fsdecode, list(arguments)[1:]):
        if not flag.startswith("-") or flag in ("-c", "-m"):
            break
        if set("EIS") & set(flag):  # Python then ignores PYTHONPATH, or imports no sitecustomize
            return False
    names = (LOG, "PYTHONPATH")
    return all(environment.get(name) == os.environ.get(name) for name in names)


def import_next() -> None:
    """Import the `sitecustomize` that Python would have found without this one."""
    sys.path.remove(os.path.dirname(__file__))
    if spec := PathFinder.find_spec("sitecustomize"):
        spec.loader.exec_module(module_from_spec(spec))


sys.addaudithook(hook)
import_next()

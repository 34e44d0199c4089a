"""Log the name of every file that a Python program reads.

`command_cache.py` puts this folder on PYTHONPATH, and Python imports a module called
`sitecustomize` at startup. Python processes that the program starts therefore log their files. A
forked process keeps the hook of its parent. Each name is logged before the file is opened, so the
log is complete even if the process is killed.
"""

import os
import site
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

LOG = "ACCEL_DEMO_RECORD"  # path of the log; if it is not set, nothing is logged
# Installed libraries are not recorded, because `command_cache.py` compares their versions. /proc,
# /sys and /dev contain no real files.
LIBRARIES = [os.path.dirname(os.__file__), *site.getsitepackages(), site.getusersitepackages()]
NOT_RECORDED = tuple(f"{folder}{os.sep}" for folder in [*LIBRARIES, "/proc", "/sys", "/dev"])
STARTS = ("os.spawn", "os.startfile", "os.system", "pty.spawn")  # events that start a program
OUR_PROGRAMS = ("python", "accelerate", "torchrun", "accel-demo")  # prefixes of program names
# Libraries run these programs to inspect the machine. The programs read none of our files.
ABOUT_THE_MACHINE = ("ldconfig", "nvidia-smi", "uname")

log = temporary_files = None  # set by begin_log; the log is in the command's temporary folder
recorded, read_before = set(), set()


def hook(event: str, arguments: tuple) -> None:
    """Record files that are opened, and started programs whose files will not be recorded.

    Source: https://docs.python.org/3/library/sys.html
    """
    if event == "open":
        path, _, flags = arguments
        is_number = isinstance(path, int)  # the file descriptor of an open file
        if not is_number and flags & (os.O_WRONLY | os.O_RDWR) != os.O_WRONLY:
            record_file(os.path.abspath(os.fsdecode(path)))
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        program, words, *_, environment = arguments  # `_` is the working directory, from Popen
        if not records_too(program, words, environment):
            record(f"!{program}")
    elif event in STARTS:
        record(f"!{arguments[0]}")


def record_file(path: str) -> None:
    if not path.startswith(NOT_RECORDED):
        record(path)


def record(line: str) -> None:
    if os.environ.get(LOG, log) != log:  # a new process, or one forked for a new command
        begin_log()
    if log is None:  # the fork server, which has not started a command yet
        read_before.add(line)
    elif line not in recorded and not f"{line}{os.sep}".startswith(temporary_files):
        recorded.add(line)
        write(line)


def begin_log() -> None:
    """Begin a log, and record the files and modules that this process has already read."""
    global log, temporary_files
    log = os.environ[LOG]
    temporary_files = f"{os.path.dirname(log)}{os.sep}"
    recorded.clear()
    for line in read_before:
        record(line)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and os.path.isabs(file):  # one torch module sets `__file__` to "_ops.py"
            record_file(file)


def write(line: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # appending is atomic
    try:
        os.write(file, os.fsencode(line) + b"\0")
    finally:
        os.close(file)


def records_too(program, arguments, environment) -> bool:
    """Return True if the new process loads this hook, or if it reads none of our files."""
    environment = os.environ if environment is None else environment
    name = os.path.basename(os.fsdecode(program))
    if name in ABOUT_THE_MACHINE:
        return True
    if not name.startswith(OUR_PROGRAMS):
        return False
    for flag in map(os.fsdecode, list(arguments)[1:]):
        if not flag.startswith("-") or flag in ("-c", "-m"):
            break
        if set("EIS") & set(flag):  # with this flag, Python does not load this module
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

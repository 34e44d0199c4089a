"""Run the audited command, then kill what it has left behind and put its files back.

`accel-demo audit` starts this program with the folder of the audit as its argument, and writes the
plan to stdin, because the environment in it may contain secrets. The operating system closes stdin
if `accel-demo audit` exits, even if it was killed: then the command is killed and the files are put
back all the same. Only this program may delete the copies, unless it was killed.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from accel_demo.errors import say
from accel_demo.files import write_whole
from accel_demo.lab.observed.folder import FolderState
from accel_demo.observer.copies import Restored, remove_copies, restore, unwritten
from accel_demo.processes.cleanup import SIGNALS, adopt_orphans, has_ended, kill_descendants
from accel_demo.processes.launch import start

POLL_INTERVAL = 0.05  # seconds
EXIT_TIMEOUT = 2  # seconds that processes may outlive the command that has started them
RESERVE = 200_000  # bytes for the result, if the disk is full


def main(folder: Path) -> None:
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)
    adopt_orphans()
    try:
        plan = json.loads(sys.stdin.readline())
    except ValueError:  # the audit has been stopped before it began
        return
    if not lock(plan["folder"]):
        error = "another audit is running in this folder. Wait until it has ended."
        finish(folder, plan, {"code": None, "error": error}, Restored())
        return
    asked = threading.Event()
    threading.Thread(target=wait_for_end, args=[asked], daemon=True).start()
    result: dict = {"code": None, "error": None}
    before = FolderState.of(plan["folder"], folder, plan["outputs"])
    try:
        (folder / "reserve").write_bytes(bytes(RESERVE))
        with open(plan["log"], "wb") as log:
            process = start(
                plan["command"],
                plan["environment"],
                log,
                log,
                cwd=plan["folder"],
                new_session=True,
            )
        while process.poll() is None and not asked.is_set():
            time.sleep(POLL_INTERVAL)
        result["code"] = process.poll()
    except OSError as error:
        result["error"] = f"cannot start {plan['command'][0]} ({error.strerror})"
    finally:
        result["left"] = kill_descendants_after(EXIT_TIMEOUT, asked)
        result["unwritten"] = unwritten(str(folder))
        restored = Restored() if plan["keep"] else restore(str(folder))
        unseen = [path for path in before.changed() if path not in restored.failed]
        unseen = [] if plan["keep"] else unseen
        result |= {"unseen": unseen, "all_watched": before.is_complete}
        finish(folder, plan, result, restored)


def finish(folder: Path, plan: dict, result: dict, restored: Restored) -> None:
    """Write the result, and delete the copies of the files that were put back."""
    (folder / "reserve").unlink(missing_ok=True)
    result |= files_of(restored)
    with suppress(OSError):  # the disk is full: then the audit puts the files back once more
        write_whole(folder / "result.json", json.dumps(result))
        remove_copies(str(folder), restored.kept)
    if not is_running(plan["audit"]):  # it was killed
        for path, reason in restored.failed.items():
            say(f"not put back: {path} ({reason})")
        clean_up(folder)


def files_of(restored: Restored) -> dict:
    """Return the fields of the result that are about the script's files."""
    return {"changed": restored.changed, "new": restored.new, "not_restored": restored.failed}


def clean_up(folder: Path) -> None:
    """Delete what an audit leaves behind, but not the command's output and copies of files."""
    for path in folder.iterdir():
        if path.name not in ("output.txt", "files"):
            path.unlink(missing_ok=True)


def lock(folder: str) -> bool:
    """Lock a folder until this program exits. Return False if another audit has locked it.

    The other audit would take files that this one has changed for the originals. That can still
    happen to files outside the folder, if two audits in different folders change the same ones.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True


def wait_for_end(asked: threading.Event) -> None:
    sys.stdin.read()  # returns if stdin is closed
    asked.set()


def kill_descendants_after(seconds: float, asked: threading.Event) -> int:
    """Kill all descendants that are still running after `seconds`, and return their number.

    Does not wait if the audit asks for the end.
    """
    deadline = time.monotonic() + seconds
    while running := [
        each for each in psutil.Process().children(recursive=True) if not has_ended(each)
    ]:
        if time.monotonic() > deadline or asked.wait(POLL_INTERVAL):
            break
    kill_descendants()
    return len(running)


def is_running(pid: int) -> bool:
    try:
        return not has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))

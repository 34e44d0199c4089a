"""Run the audited command, then kill what it has left behind and put its files back.

`accel-demo audit` starts this program with the folder of the audit as its argument. The operating
system closes stdin if `accel-demo audit` exits, even if it was killed: then the command is killed
and the files are put back all the same. `kill` on stdin does the same earlier.
"""

import fcntl
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from accel_demo.files import write_whole
from accel_demo.lab.audit.folder import FolderState
from accel_demo.observer.files import restore
from accel_demo.processes.cleanup import adopt_orphans, kill_descendants
from accel_demo.processes.launch import start

POLL_INTERVAL = 0.05  # seconds
EXIT_TIMEOUT = 3  # seconds that processes may outlive the command that has started them


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    adopt_orphans()
    plan = json.loads((folder / "plan.json").read_text())
    if not lock(plan["folder"]):
        error = "another audit is running in this folder. Wait until it has ended."
        finish(folder, {"code": None, "error": error})
        return
    asked = threading.Event()
    threading.Thread(target=wait_for_order, args=[asked], daemon=True).start()
    result: dict = {"code": None, "error": None}
    before = FolderState.of(plan["folder"], folder, plan["outputs"])
    try:
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
        result["left"] = kill_descendants_after(0 if asked.is_set() else EXIT_TIMEOUT)
        changed, new = restore(str(folder)) if not plan["keep"] else ([], [])
        result |= {"changed": changed, "new": new, "all_watched": before.is_complete}
        finish(folder, result | {"unseen": before.changed() if not plan["keep"] else []})


def finish(folder: Path, result: dict) -> None:
    """Write the result, and delete the copies of the script's files."""
    shutil.rmtree(folder / "files", ignore_errors=True)
    write_whole(folder / "result.json", json.dumps(result))


def lock(folder: str) -> bool:
    """Lock a folder until this program exits. Return False if another audit has locked it.

    The other audit would take files that this one has changed for the originals.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True


def wait_for_order(asked: threading.Event) -> None:
    sys.stdin.readline()  # returns if stdin is closed, too
    asked.set()


def kill_descendants_after(seconds: float) -> int:
    """Kill all descendants that are still running after `seconds`, and return their number."""
    deadline = time.monotonic() + seconds
    while running := [
        each
        for each in psutil.Process().children(recursive=True)
        if each.status() != psutil.STATUS_ZOMBIE
    ]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL)
    kill_descendants()
    return len(running)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

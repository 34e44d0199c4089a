"""Run the audited command, then kill what it has left behind and put its files back.

`accel-demo audit` starts this program with the folder of the audit as its argument. The operating
system closes stdin if `accel-demo audit` exits, even if it was killed: then the command is killed
and the files are put back all the same. `kill` on stdin does the same earlier.
"""

import json
import signal
import sys
import threading
import time
from pathlib import Path

from accel_demo.files import write_whole
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
    asked = threading.Event()
    threading.Thread(target=wait_for_order, args=[asked], daemon=True).start()
    result: dict = {"code": None, "error": None}
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
        result |= {"changed": changed, "new": new}
        write_whole(folder / "result.json", json.dumps(result).encode())


def wait_for_order(asked: threading.Event) -> None:
    sys.stdin.readline()  # returns if stdin is closed, too
    asked.set()


def kill_descendants_after(seconds: float) -> int:
    """Kill all descendants that are still running after `seconds`, and return their number."""
    import psutil

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

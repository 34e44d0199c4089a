"""Start the commands of one node, and kill them as soon as `accel-demo nodes` exits.

`accel-demo nodes` starts this program once per node. It reads orders from stdin, one JSON object
per line. When stdin is closed, it kills its descendants. The operating system closes stdin even if
`accel-demo nodes` is killed with SIGKILL.

In a namespace of its own, this program is process 1 of the node: when it exits, the kernel kills
all other processes of the node, and removes the node's network. Elsewhere on Linux, it adopts the
descendants whose parents have exited. On macOS, it cannot find these.

Python processes record in a folder what they do with torch (`accel_demo/observer/processes.py`).
"""

import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress

import psutil

from accel_demo.observer import agent, events
from accel_demo.processes.cleanup import adopt_orphans, kill_descendants

POLL_INTERVAL = 0.05  # seconds between two checks of the processes
# Python ignores these signals, but commands that are not Python programs expect the default.
DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)
NO_STDIN = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]


class Keeper:
    """The processes of one node. `reports` is a pipe to `accel-demo nodes`.

    `folder` receives the events of the observer.
    """

    def __init__(self, reports: int, folder: str):
        self.reports, self.folder = reports, folder
        self.commands: list[tuple[list[str], dict[str, str]]] = []  # with their environments
        self.exit_codes: dict[int, int | None] = {}  # of each command's process; None: it runs

    def handle_order(self, order: dict) -> None:
        if order["do"] in ("start", "start again"):
            self.commands = order.get("commands", self.commands)
            self.start()
        elif order["do"] == "stop":
            self.send_signal(signal.SIGTERM)
        elif order["do"] == "kill":
            self.kill()
        elif order["do"] == "look":
            self.report(**self.seen(order["interface"]))

    def start(self) -> None:
        self.exit_codes.clear()
        for command, environment in self.commands:
            program = shutil.which(command[0], path=environment.get("PATH")) or command[0]
            options: dict = {"file_actions": NO_STDIN, "setsigdef": DEFAULT_SIGNALS}
            observed = agent.inject(environment, events.NODE_FOLDER, self.folder)
            try:  # not with Popen, whose objects would compete with `exited_children`
                pid = os.posix_spawn(program, command, observed, **options)
            except OSError as error:
                print(f"error: cannot start {command[0]} ({error.strerror})", file=sys.stderr)
                self.finish(127)
                return
            self.exit_codes[pid] = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the commands, but not to the processes that they have started."""
        for pid, code in self.exit_codes.items():
            if code is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def reap(self) -> None:
        """Note which commands have exited. Report the exit code if all have, or one has failed."""
        for pid, code in exited_children():
            if pid in self.exit_codes:  # otherwise, a command started it, and has exited
                self.exit_codes[pid] = code
        codes = [code for code in self.exit_codes.values() if code is not None]
        failed = [code for code in codes if code != 0]
        if failed or (codes and len(codes) == len(self.exit_codes)):
            self.finish(failed[0] if failed else 0)

    def finish(self, code: int) -> None:
        """Kill what the commands have left behind, and report the exit code."""
        self.kill()
        self.report(code=code)

    def kill(self) -> None:
        """Kill all processes of the node, as if it had died: it reports no exit code."""
        self.exit_codes.clear()
        kill_descendants()
        self.reap()

    def seen(self, interface: str | None) -> dict:
        """Return the events, the running processes, and how much the node has sent to others.

        `interface` connects the node to the others. If it is None, the bytes are not counted.
        """
        running = [process.pid for process in psutil.Process().children(recursive=True)]
        counters = psutil.net_io_counters(pernic=True) if interface else {}
        return {
            "events": events.read_events(self.folder),
            "running": running,
            "bytes_sent": counters[interface].bytes_sent if interface else None,
        }

    def report(self, **content) -> None:
        with suppress(BrokenPipeError):  # `accel-demo nodes` has died, so stdin will close
            os.write(self.reports, (json.dumps(content) + "\n").encode())


def exited_children() -> Iterator[tuple[int, int]]:
    """Yield the process ID and the exit code of each child that has exited since the last call."""
    with suppress(ChildProcessError):  # there are no children
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def read_orders(orders: queue.SimpleQueue) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)  # stdin is closed


def main() -> None:
    reports = int(sys.argv[1])
    os.set_inheritable(reports, False)
    # Only orders stop this program. (The commands would inherit SIG_IGN, but not a handler.)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    adopt_orphans()
    orders: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
    threading.Thread(target=read_orders, args=[orders], daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        keeper = Keeper(reports, folder)
        keeper.report(ready=True)
        while True:
            with suppress(queue.Empty):
                order = orders.get(timeout=POLL_INTERVAL)
                if order is None:
                    break
                keeper.handle_order(order)
            keeper.reap()
        keeper.kill()


if __name__ == "__main__":
    main()

"""One node: its keeper, what its processes print, and its exit code."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, NamedTuple, TextIO

from accel_demo.errors import UserError
from accel_demo.lab.cables import Cables, Loopback, hosts_file
from accel_demo.lab.nodes.members import NodeState, read_members
from accel_demo.processes.environment import environment_for
from accel_demo.processes.launch import STARTER

# -P keeps the files of the working directory from shadowing the modules that Python imports.
KEEPER = [sys.executable, "-P", "-m", "accel_demo.lab.nodes.keeper"]
START_TIMEOUT = 20  # seconds that a keeper may need to start
LOOK_TIMEOUT = 5  # seconds that a keeper may need to answer
ADVICE = ". Use --network loopback."
output_lock = threading.Lock()


class NodeReport(NamedTuple):
    """What happened on a node: its commands have exited, or have printed an expected text."""

    rank: int
    exit_code: int | None = None
    text: str | None = None


class Node:
    """A node that is ready to start commands. Use it in a `with` statement.

    Lines that the commands print are printed with the node's name in front of them. A report is
    added to `reports` when a line contains one of the `expected_texts`, when a command has failed,
    and when all commands have exited.
    """

    def __init__(
        self,
        rank: int,
        network: Loopback | Cables,
        reports: SimpleQueue[NodeReport],
        expected_texts: set[str],
    ):
        self.rank, self.network = rank, network
        self.reports, self.expected_texts = reports, expected_texts
        self.has_answered, self.is_ready = threading.Event(), False
        self.state = NodeState()
        self.printed_at = time.monotonic()  # when the commands last printed a line
        self.found_port_in_use = False

    def __enter__(self) -> "Node":
        """Start the keeper, wait until it is ready, and connect the node."""
        reading, writing = os.pipe()
        with hosts_file(self.network) as file:
            self.keeper = subprocess.Popen(
                self.network.wrapped(self.rank, file, [*KEEPER, str(writing)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
                start_new_session=True,  # so that Ctrl-C only reaches `accel-demo nodes`
            )
            os.close(writing)
            self.threads = [
                threading.Thread(target=self._copy_output, args=[self.keeper.stdout, sys.stdout]),
                threading.Thread(target=self._copy_output, args=[self.keeper.stderr, sys.stderr]),
                threading.Thread(
                    target=self._read_reports, args=[os.fdopen(reading, encoding="utf-8")]
                ),
            ]
            try:
                for thread in self.threads:
                    thread.daemon = True
                    thread.start()
                self.has_answered.wait(START_TIMEOUT)
                if not self.is_ready:
                    advice = "" if isinstance(self.network, Loopback) else ADVICE
                    raise UserError(f"node {self.rank} could not be started{advice}")
                self.network.connect(self.rank, self.keeper.pid)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *error) -> None:
        """Kill all processes of the node, and wait until they are gone."""
        assert self.keeper.stdin
        with suppress(BrokenPipeError):
            self.keeper.stdin.close()
        self.keeper.wait()
        for thread in self.threads:
            thread.join(timeout=5)

    def send_order(self, what: str, **details) -> None:
        assert self.keeper.stdin
        with suppress(BrokenPipeError):  # the keeper has died; `_read_reports` notices it
            self.keeper.stdin.write((json.dumps({"do": what, **details}) + "\n").encode())
            self.keeper.stdin.flush()

    def look(self) -> NodeState:
        """Return what was seen on the node until now."""
        self.has_answered.clear()
        own = None if isinstance(self.network, Loopback) else self.network.interface
        self.send_order("look", interface=own)
        self.has_answered.wait(LOOK_TIMEOUT)
        return self.state

    def _read_reports(self, reports: TextIO) -> None:
        with reports:
            for line in reports:
                report = json.loads(line)
                if "code" in report:
                    self.reports.put(NodeReport(self.rank, exit_code=report["code"]))
                elif "events" in report:
                    running = report["running"]
                    members = read_members(report["events"], running)
                    self.state = NodeState(members, len(running), report["bytes_sent"])
                    self.has_answered.set()
                else:
                    self.is_ready = True
                    self.has_answered.set()
        self.reports.put(NodeReport(self.rank, exit_code=1))  # the keeper has exited
        self.has_answered.set()

    def _copy_output(self, source: IO[bytes], target: TextIO) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\r\n")
                self.printed_at = time.monotonic()
                if "address already in use" in text.lower():
                    self.found_port_in_use = True
                if "\r" in text:  # a progress bar overwrites its line: show its last state
                    text = text.split("\r")[-1].rstrip()
                    if not text:
                        continue
                try:
                    with output_lock:
                        target.write(f"node {self.rank} | {text}\n")
                        target.flush()
                except OSError:  # nobody reads our output: `| head` or the terminal is closed
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                for expected in self.expected_texts:
                    if expected in text:
                        self.reports.put(NodeReport(self.rank, text=expected))


def environment_for_nodes(network: Loopback | Cables) -> dict[str, str]:
    """Return the variables that the commands of all nodes share.

    GPUs are hidden, because every node would choose the same ones. ACCELERATE_USE_CPU=true lets a
    plain `Accelerator()` connect its processes nevertheless. (`accelerate launch` overrides it if
    its config has the distributed type NO or MULTI_CPU.) Python programs are started normally,
    because only a process of the node can start another one on the node.
    """
    environment = environment_for(
        {
            "GLOO_SOCKET_IFNAME": network.interface,
            "CUDA_VISIBLE_DEVICES": "-1",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
        }
    )
    for name in (STARTER, "PYTHON_EXEC"):
        environment.pop(name, None)
    return environment

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
from typing import IO, TextIO

from accel_demo.errors import UserError
from accel_demo.lab.networks import Loopback, Namespaces
from accel_demo.processes import fork_server
from accel_demo.processes.environment import environment_for

KEEPER = [sys.executable, "-m", "accel_demo.lab.nodes.keeper"]
START_TIMEOUT = 20  # seconds that a keeper may need to start
output_lock = threading.Lock()


class Node:
    """A node that is ready to start commands. Use it in a `with` statement.

    Lines that the commands print are printed with the node's name in front of them. When a command
    has failed, or when all have exited, (rank of the node, exit code) is added to `exits`. When a
    line contains a text in `printed`, its value there becomes the time of `time.monotonic()`.
    """

    def __init__(
        self,
        rank: int,
        network: Loopback | Namespaces,
        exits: SimpleQueue,
        printed: dict[str, float],
    ):
        self.rank, self.network, self.exits, self.printed = rank, network, exits, printed
        self.is_ready = threading.Event()

    def __enter__(self) -> "Node":
        reading, writing = os.pipe()
        self.keeper = subprocess.Popen(
            self.network.wrapped([*KEEPER, str(writing)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[writing],
            start_new_session=True,  # so that Ctrl-C only reaches `accel-demo nodes`
        )
        os.close(writing)
        assert self.keeper.stdout and self.keeper.stderr
        self.threads = [
            threading.Thread(target=self._copy_output, args=[self.keeper.stdout, sys.stdout]),
            threading.Thread(target=self._copy_output, args=[self.keeper.stderr, sys.stderr]),
            threading.Thread(target=self._read_reports, args=[os.fdopen(reading)]),
        ]
        for thread in self.threads:
            thread.daemon = True
            thread.start()
        self.send_order("get ready", **self.network.identity(self.rank))
        is_ready = self.is_ready.wait(START_TIMEOUT)
        if not is_ready or self.keeper.poll() is not None:
            self.__exit__()
            raise UserError(f"node {self.rank} could not be started. Use --network loopback.")
        self.network.connect(self.rank, self.keeper.pid)
        return self

    def __exit__(self, *error) -> None:
        """Kill all processes of the node, and wait until they are gone."""
        assert self.keeper.stdin
        with suppress(BrokenPipeError):
            self.keeper.stdin.close()
        self.keeper.wait()
        for thread in self.threads:
            thread.join(timeout=5)

    def start(self, commands: list[tuple[list[str], dict]]) -> None:
        """Start commands. Each comes with its environment variables."""
        words, environments = zip(*commands, strict=True)
        self.send_order("start", commands=words, environments=environments)

    def send_order(self, what: str, **details) -> None:
        assert self.keeper.stdin
        with suppress(BrokenPipeError):  # the keeper has died; `_read_reports` notices it
            self.keeper.stdin.write((json.dumps({"do": what, **details}) + "\n").encode())
            self.keeper.stdin.flush()

    def _read_reports(self, reports: TextIO) -> None:
        with reports:
            for line in reports:
                report = json.loads(line)
                if "code" in report:
                    self.exits.put((self.rank, report["code"]))
                else:
                    self.is_ready.set()
        self.exits.put((self.rank, 1))  # the keeper has exited
        self.is_ready.set()

    def _copy_output(self, source: IO[bytes], target: TextIO) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\n")
                if "\r" in text:  # a progress bar overwrites its line: show its last state
                    text = text.split("\r")[-1].rstrip()
                    if not text:
                        continue
                for expected in self.printed:
                    if expected in text:
                        self.printed[expected] = min(self.printed[expected], time.monotonic())
                try:
                    with output_lock:
                        target.write(f"node {self.rank} | {text}\n")
                        target.flush()
                except BrokenPipeError:  # nobody reads our output, as after `| head`
                    os.kill(os.getpid(), signal.SIGTERM)
                    return


def environment_for_nodes(network: Loopback | Namespaces) -> dict[str, str]:
    """Return the variables that the commands of all nodes share.

    GPUs are hidden, because every node would choose the same ones. Processes are not forked from a
    server, because the server is not on the node.
    """
    environment = environment_for(
        {
            "GLOO_SOCKET_IFNAME": network.interface,
            "CUDA_VISIBLE_DEVICES": "-1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
            "HF_HOME": os.devnull,
        }
    )
    for name in (fork_server.ADDRESS, "PYTHON_EXEC"):
        environment.pop(name, None)
    return environment

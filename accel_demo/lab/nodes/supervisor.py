"""Wait until all nodes have exited, and disturb the last one: cut its cable, or kill it."""

import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from accel_demo.errors import say
from accel_demo.lab.cables import Cables, Loopback
from accel_demo.lab.nodes import findings
from accel_demo.lab.nodes.node import Node, NodeReport
from accel_demo.terminal import display

FAILURE_TIMEOUT = 30  # seconds that the other nodes may continue after a node has failed
STOP_TIMEOUT = 30  # seconds to save a checkpoint after Ctrl-C
# For each event, the flag that asks for it
FLAGS = {
    "cut": "--cut-after",
    "plug in": "--cut-for",
    "kill": "--kill-after",
    "start again": "--restart-after",
}


class NodeEvent(NamedTuple):
    """Something that happens to the last node."""

    name: str  # a key of `FLAGS`
    seconds: float  # after a node has printed `text`, or after the start if `text` is None
    text: str | None = None


class Supervisor:
    """Apply events to the last node, and wait until all nodes have exited.

    If no node prints a line for `silence` seconds, describe what was seen until then. The next
    description comes after twice as long.

    If a node fails, the others are killed after `FAILURE_TIMEOUT` seconds. So are nodes that cannot
    reach a node that has exited: some launchers would wait for it for minutes. An elastic launch
    continues without a node, but not without node 0, which runs the rendezvous. Its result is that
    of node 0.
    """

    def __init__(
        self,
        nodes: list[Node],
        network: Loopback | Cables,
        reports: SimpleQueue[NodeReport],
        events: list[NodeEvent],
        is_elastic: bool,
        silence: float,
    ):
        self.nodes, self.network, self.reports = nodes, network, reports
        self.events, self.is_elastic = list(events), is_elastic
        self.codes: dict[int, int | None] = {node.rank: None for node in nodes}  # None: it runs
        self.times: dict[str | None, float] = {None: time.monotonic()}  # when texts were printed
        self.cable_is_out = self.has_killed = False
        self.deadline = float("inf")  # when the remaining nodes are killed
        self.reason = ""  # for the deadline
        self.silence = silence

    def wait_for_all(self) -> int:
        """Return 0 if every node has exited with code 0, and 1 otherwise."""
        while self.running_nodes() or self.will_restart():
            if time.monotonic() > self.deadline:
                for node in self.running_nodes():
                    late = f"it was still running {FAILURE_TIMEOUT} s after {self.reason}"
                    say(f"killed node {node.rank}: {late}")
                break
            for event in [event for event in self.events if self.is_due(event)]:
                self.events.remove(event)
                self.apply_event(event.name)
            self.describe_silence()
            with suppress(Empty):
                self.handle_report(self.reports.get(timeout=0.05))
        self.drop_events()
        codes = [self.codes[0]] if self.is_elastic else self.codes.values()
        return int(any(code != 0 for code in codes))  # nodes killed by the deadline have no code

    def describe_silence(self) -> None:
        silent = time.monotonic() - max(node.printed_at for node in self.nodes)
        if silent > self.silence:
            line = findings.while_silent([node.look() for node in self.nodes], silent)
            display(f"--- {line}")
            self.silence = 2 * silent

    def running_nodes(self) -> list[Node]:
        return [node for node in self.nodes if self.codes[node.rank] is None]

    def will_restart(self) -> bool:
        """Return whether a node that has been killed will be started again."""
        return self.has_killed and any(event.name == "start again" for event in self.events)

    def is_due(self, event: NodeEvent) -> bool:
        started = self.times.get(event.text, float("inf"))
        return time.monotonic() >= started + event.seconds

    def handle_report(self, report: NodeReport) -> None:
        if report.text is not None:
            self.times.setdefault(report.text, time.monotonic())
            return
        self.codes[report.rank] = report.exit_code
        if report.exit_code != 0:
            say(f"node {report.rank} has failed (exit code {report.exit_code})")
        if self.is_elastic:
            if report.rank == 0:
                self.drop_events()
                self.set_deadline("node 0 had exited")
        elif report.exit_code != 0 or self.cable_is_out:
            self.set_deadline(f"node {report.rank} had exited")

    def apply_event(self, event: str) -> None:
        """Apply an event to the last node. A node that has exited cannot be killed."""
        node = self.nodes[-1]
        if event in ("cut", "plug in"):
            assert isinstance(self.network, Cables)
            self.cable_is_out = event == "cut"
            self.network.set_cable(node.rank, is_plugged_in=not self.cable_is_out)
            done = "pulled out" if self.cable_is_out else "plugged in again"
            text = f"the cable of node {node.rank} is {done}"
        elif event == "kill":
            if self.codes[node.rank] is not None:
                say(f"--kill-after had no effect: node {node.rank} had already exited")
                return
            node.send_order("kill")
            self.has_killed, self.codes[node.rank] = True, 1
            text = f"node {node.rank} is killed"
            if not self.is_elastic and not self.will_restart():
                self.set_deadline(f"node {node.rank} was killed")
        else:
            if not self.has_killed:
                return
            node.send_order("start again")
            self.codes[node.rank] = None
            text = f"node {node.rank} is started again"
        display(f"--- {text}")

    def drop_events(self) -> None:
        """Forget the events that have not happened, and print why they have not."""
        for event in self.events:
            reason = "the launch ended earlier"
            if event.text not in self.times:
                reason = f'no node printed "{event.text}" in time'
            say(f"{FLAGS[event.name]} had no effect: {reason}")
        self.events.clear()

    def set_deadline(self, reason: str) -> None:
        if self.deadline == float("inf"):
            self.deadline, self.reason = time.monotonic() + FAILURE_TIMEOUT, reason

    def stop(self) -> int:
        """Send SIGTERM to the commands on all nodes, and wait until they exit.

        Return the exit code of a program that Ctrl-C has stopped.
        """
        if waiting := findings.waiting([node.look() for node in self.nodes]):
            display(f"--- {waiting}")
        say(f"\nstopping all nodes (at most {STOP_TIMEOUT} s; press Ctrl-C again to kill them)")
        for node in self.running_nodes():
            node.send_order("stop")
        deadline = time.monotonic() + STOP_TIMEOUT
        with suppress(KeyboardInterrupt):
            while self.running_nodes() and time.monotonic() < deadline:
                with suppress(Empty):
                    report = self.reports.get(timeout=0.1)
                    if report.exit_code is not None:
                        self.codes[report.rank] = report.exit_code
        return 130

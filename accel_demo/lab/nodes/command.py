"""Run a launch on several nodes, as if each were a machine of its own.

accel-demo nodes --nodes 2 --processes-per-node 2
accel-demo nodes --rate 100mbit -- torchrun accel_demo/train.py --collective-timeout 10

COMMAND is what you would type on each machine: an `accelerate launch` or `torchrun` command, a
Python script that connects its processes itself, or any other program. Launchers get the flags that
differ between nodes, and `{node}` in COMMAND is replaced by the node's rank.

As root on Linux, each node has its own network, host name and address. Otherwise, all nodes use
this machine's loopback interface. When this command exits, even if it is killed, all processes and
networks that it has started are removed.
"""

import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from accel_demo.errors import Parser, UserError
from accel_demo.lab import networks
from accel_demo.lab.networks import Loopback, Namespaces, Unavailable
from accel_demo.lab.nodes import launches
from accel_demo.lab.nodes.node import Node, environment_for_nodes
from accel_demo.processes.launch import free_port

MOST_NODES = 8
FAILURE_TIMEOUT = 30  # seconds that the other nodes may continue after a node has failed
STOP_TIMEOUT = 30  # seconds to save a checkpoint after Ctrl-C


def main(arguments: list[str]) -> int:
    options = read(arguments)
    with ExitStack() as stack:
        earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
        stack.callback(signal.signal, signal.SIGTERM, earlier)
        network = enter_network(options, stack)
        plan = launches.Plan(
            options.nodes,
            options.processes_per_node,
            [network.address(node) for node in range(options.nodes)],
            meeting_port(options.port, network),
            options.elastic,
        )
        commands = [launches.commands_for(options.command, plan, n) for n in range(plan.nodes)]
        events = events_of(options)
        printed = {event.after: float("inf") for event in events if isinstance(event.after, str)}
        exits: SimpleQueue[tuple[int, int]] = SimpleQueue()
        nodes = [stack.enter_context(Node(n, network, exits, printed)) for n in range(plan.nodes)]
        shared = environment_for_nodes(network)
        for node, node_commands in zip(nodes, commands, strict=True):
            print_commands(node, node_commands)
            node.start([(words, shared | own) for words, own in node_commands])
        supervisor = Supervisor(nodes, network, options.elastic)
        try:
            return supervisor.wait_for_all(exits, events, printed)
        except KeyboardInterrupt:
            return supervisor.stop(exits)


def read(arguments: list[str]):
    """Parse and check the options. Raises `UserError` if an option is invalid."""
    own, command = arguments, None
    if "--" in arguments:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    usage = "accel-demo nodes [OPTIONS] [-- COMMAND …]"
    parser = Parser(__doc__, prog="accel-demo nodes", usage=usage)
    add = parser.add_argument
    add("--nodes", type=int, default=2, metavar="N", help="number of nodes (default: 2)")
    help = "processes on each node (default: 2)"
    add("--processes-per-node", type=int, default=2, metavar="N", help=help)
    help = "namespaces (needs root and Linux) or loopback; auto uses namespaces if it can (default)"
    add("--network", choices=("auto", "namespaces", "loopback"), default="auto", help=help)
    help = "the most that each node can send, such as 100mbit (needs namespaces)"
    add("--rate", metavar="RATE", help=help)
    help = "how long a packet takes from one node to another, such as 5ms (needs namespaces and a "
    help += "kernel with the module sch_netem)"
    add("--delay", metavar="TIME", help=help)
    help = "pull the last node's cable S seconds after the start, or as soon as a node prints the "
    help += 'text S, such as "epoch 2/10" (needs namespaces)'
    add("--cut-after", type=seconds_or_text, metavar="S", help=help)
    help = "plug the cable in again after S seconds"
    add("--cut-for", type=float, metavar="S", help=help)
    help = "kill the last node's processes after S, as above"
    add("--kill-after", type=seconds_or_text, metavar="S", help=help)
    help = "start the killed node's command again S seconds after the kill"
    add("--restart-after", type=float, metavar="S", help=help)
    help = "go on with fewer nodes if one fails: torchrun --nnodes 1:N"
    add("--elastic", action="store_true", help=help)
    help = "port of node 0 on which the nodes meet (default: any free port)"
    add("--port", type=int, default=0, metavar="PORT", help=help)
    options = parser.parse_args(own)
    check(options)
    if command is not None and not command:
        raise UserError("there is no command after --")
    if command is None:
        command = launches.default_command(options.elastic)
        if not Path("accel_demo/train.py").exists():
            raise UserError(
                "accel_demo/train.py is not in this folder. Go to the repository, or add a command."
            )
    options.command = command
    return options


def seconds_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def check(options) -> None:
    if not 0 <= options.port < 65536:
        raise UserError(f"--port must be from 0 (any free port) to 65535, got {options.port}")
    if not 1 <= options.nodes <= MOST_NODES:
        raise UserError(f"--nodes must be from 1 to {MOST_NODES}, got {options.nodes}")
    most = 8 * (os.cpu_count() or 1)
    per_node = options.processes_per_node
    if not 1 <= per_node <= most // options.nodes:
        raise UserError(
            f"--processes-per-node must be from 1 to {most // options.nodes}, got {per_node}"
        )
    if options.rate is not None:
        networks.check_rate(options.rate)
    if options.delay is not None:
        networks.check_delay(options.delay)
    for first, second in (("cut_after", "cut_for"), ("kill_after", "restart_after")):
        names = [f"--{name.replace('_', '-')}" for name in (first, second)]
        values = [getattr(options, name) for name in (first, second)]
        for name, value in zip(names, values, strict=True):
            if isinstance(value, float) and not 0 <= value <= 86_400:
                raise UserError(f"{name} must be from 0 to 86400 seconds, got {value:g}")
            if isinstance(value, str) and not value.strip():
                raise UserError(f"{name} needs a number of seconds, or a text that a node prints")
        if values[0] is None and values[1] is not None:
            raise UserError(f"{names[1]} needs {names[0]}")
        if values[0] is not None and options.nodes < 2:
            raise UserError(f"{names[0]} needs at least two nodes")
    if options.network == "loopback" and (flag := flag_that_needs_namespaces(options)):
        raise UserError(f"{flag} needs network namespaces. Leave --network loopback out.")


def meeting_port(port: int, network: Loopback | Namespaces) -> int:
    """Return a port on which the nodes can meet: `port`, or any free port if `port` is 0."""
    if port and network.name == "namespaces":
        return port  # nothing runs in the namespace of node 0 yet
    try:
        return free_port(port)
    except UserError:
        raise UserError(f"port {port} is in use. Choose another --port, or leave it out.") from None


def enter_network(options, stack: ExitStack) -> Loopback | Namespaces:
    """Return a network that works on this machine, and add it to `stack`.

    Raises `UserError` if an option needs namespaces, but this machine does not allow them.
    """
    if options.network != "loopback":
        try:
            return stack.enter_context(Namespaces(options.nodes, options.rate, options.delay))
        except Unavailable as reason:
            if flag := flag_that_needs_namespaces(options):
                raise UserError(f"{flag} does not work here: {reason}") from None
            print(f"using loopback: {reason}", file=sys.stderr)
    return stack.enter_context(Loopback(options.nodes))


def flag_that_needs_namespaces(options) -> str | None:
    for name in ("rate", "delay", "cut_after"):
        if getattr(options, name) is not None:
            return f"--{name.replace('_', '-')}"
    return "--network namespaces" if options.network == "namespaces" else None


def print_commands(node: Node, commands: list[tuple[list[str], dict]]) -> None:
    """Print the node's address, and what it starts."""
    address = node.network.address(node.rank)
    line = f"node {node.rank} ({address}): {shlex.join(commands[0][0])}"
    if len(commands) > 1:
        line += f"  # ranks {', '.join(variables['RANK'] for _, variables in commands)}"
    print(line, flush=True)


class Event(NamedTuple):
    """Something that happens to the last node."""

    name: str  # "cut", "plug in", "kill" or "start again"
    after: float | str  # seconds after the start, or a text that a node prints
    delay: float = 0  # seconds after that


def events_of(options) -> list[Event]:
    """Return the events that the options ask for."""
    events = []
    for after, delay, start, end in (
        (options.cut_after, options.cut_for, "cut", "plug in"),
        (options.kill_after, options.restart_after, "kill", "start again"),
    ):
        if after is not None:
            events.append(Event(start, after))
            if delay is not None:
                events.append(Event(end, after, delay))
    return events


class Supervisor:
    """Apply events to the last node, and wait until all nodes have exited."""

    def __init__(self, nodes: list[Node], network: Loopback | Namespaces, elastic: bool):
        self.nodes, self.network, self.elastic = nodes, network, elastic
        self.codes: dict[int, int | None] = {node.rank: None for node in nodes}  # None: it runs
        self.cable_is_out = self.has_killed = False
        self.deadline = float("inf")  # when the remaining nodes are killed

    def wait_for_all(
        self, exits: SimpleQueue, events: list[Event], printed: dict[str, float]
    ) -> int:
        """Return 0 if every node has exited with code 0, and 1 otherwise.

        `printed` says when a node first printed the text of an event. It is infinity until then.
        If a node fails, the others are killed after `FAILURE_TIMEOUT` seconds. So are nodes that
        cannot reach a node that has exited: some launchers would wait for it for minutes. An
        elastic launch continues without a node, and its result is that of node 0.
        """
        started, events = time.monotonic(), list(events)

        def moment(event: Event) -> float:
            after = event.after
            return event.delay + (printed[after] if isinstance(after, str) else started + after)

        while remaining := self.running_nodes():
            if time.monotonic() > self.deadline:
                names = " and ".join(f"node {node.rank}" for node in remaining)
                warn(f"{names} killed after waiting for {FAILURE_TIMEOUT} s")
                break
            for event in sorted(events, key=moment):
                if moment(event) <= time.monotonic():
                    events.remove(event)
                    will_restart = any(later.name == "start again" for later in events)
                    self.apply_event(event.name, will_restart)
            try:
                rank, code = exits.get(timeout=0.05)
            except Empty:
                continue
            self.codes[rank] = code
            if code != 0:
                warn(f"node {rank} has failed (exit code {code})")
            if (code != 0 or self.cable_is_out) and not self.can_continue_without(rank):
                self.set_deadline()
        warn_about_events(events)
        codes = [self.codes[0]] if self.elastic else self.codes.values()
        return int(any(code != 0 for code in codes))  # nodes killed by the deadline have no code

    def running_nodes(self) -> list[Node]:
        return [node for node in self.nodes if self.codes[node.rank] is None]

    def apply_event(self, event: str, will_restart: bool) -> None:
        """Apply an event to the last node. A node that has exited cannot be killed."""
        node = self.nodes[-1]
        if event in ("cut", "plug in"):
            assert isinstance(self.network, Namespaces)
            self.cable_is_out = event == "cut"
            self.network.set_cable(node.rank, is_plugged_in=not self.cable_is_out)
            done = "pulled out" if self.cable_is_out else "plugged in again"
            text = f"the cable of node {node.rank} is {done}"
        elif event == "kill":
            self.has_killed = self.codes[node.rank] is None
            if not self.has_killed:
                return
            node.send_order("kill")
            text = f"node {node.rank} is killed"
            if not will_restart:
                self.codes[node.rank] = 0 if self.elastic else 1
                if not self.elastic:
                    self.set_deadline()
        else:
            if not self.has_killed:
                return
            node.send_order("start again")
            text = f"node {node.rank} is started again"
        print(f"--- {text}", flush=True)

    def can_continue_without(self, rank: int) -> bool:
        return self.elastic and rank != 0  # node 0 runs the rendezvous

    def set_deadline(self) -> None:
        self.deadline = min(self.deadline, time.monotonic() + FAILURE_TIMEOUT)

    def stop(self, exits: SimpleQueue) -> int:
        """Ask all nodes to stop, as Ctrl-C does on a single machine. Return the exit code."""
        warn(f"\nstopping all nodes (at most {STOP_TIMEOUT} s; press Ctrl-C again to kill them)")
        for node in self.running_nodes():
            node.send_order("stop")
        deadline = time.monotonic() + STOP_TIMEOUT
        try:
            while self.running_nodes() and time.monotonic() < deadline:
                with suppress(Empty):
                    rank, code = exits.get(timeout=0.1)
                    self.codes[rank] = code
        except KeyboardInterrupt:
            pass
        return 130


def warn_about_events(events: list[Event]) -> None:
    """Print which events have not happened, and why."""
    for event in events:
        if event.name in ("cut", "kill"):
            is_text = isinstance(event.after, str)
            reason = f'no node printed "{event.after}"' if is_text else "the launch ended earlier"
            warn(f"--{event.name}-after had no effect: {reason}")


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

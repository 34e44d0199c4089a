"""Run a launch on several nodes, as if each were a machine of its own.

accel-demo nodes --nodes 2 --processes-per-node 2
accel-demo nodes --rate 100mbit -- torchrun train.py --epochs 3

COMMAND is what you would type on each machine: an `accelerate launch` or `torchrun` command, a
Python script that connects its processes itself, or any other program. Launchers get the flags that
differ between nodes, and `{node}` in COMMAND is replaced by the node's rank. With
`--slurm-variables`, a script starts as with Slurm's `srun`.

Lines that begin with `---` describe what was seen: a node that was lost, process groups that do not
connect the nodes, processes that trained alone, and which ranks wait if nothing is printed.

As root on Linux, each node has its own network, host name and address. Otherwise, all nodes use
this machine's loopback interface. When this command exits, even if it is killed, its processes and
networks are removed.
"""

import os
import re
import shlex
from contextlib import ExitStack
from queue import SimpleQueue

from accel_demo.errors import UserError, say
from accel_demo.lab import cables
from accel_demo.lab.cables import Cables, Loopback, Unavailable, open_cables
from accel_demo.lab.nodes import findings, launches
from accel_demo.lab.nodes.node import Node, NodeReport, environment_for_nodes
from accel_demo.lab.nodes.supervisor import NodeEvent, Supervisor
from accel_demo.options import Parser
from accel_demo.processes.cleanup import sigterm_raises
from accel_demo.processes.launch import free_port
from accel_demo.terminal import display

MOST_NODES = 8
# A number with a unit, which is not a text that a node prints
TIME = r"[0-9.]+ *(us|ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)"
ON_THE_CPU = (
    "all processes use the CPU: GPUs are hidden, and ACCELERATE_USE_CPU=true lets a plain "
    "Accelerator() connect its processes"
)
CLONES_WITHOUT_GPUS = (
    "this machine has no GPU, so the processes of Accelerator() were connected only because of "
    "ACCELERATE_USE_CPU=true. Without `accel-demo nodes`, each would be process 0 of 1."
)
SHARED_PORTS = (
    '"address already in use": on loopback, all nodes share the ports of this machine. Use '
    "MASTER_ADDR and MASTER_PORT from the environment, or different ports on each node."
)


def main(arguments: list[str]) -> int:
    options = read(arguments)
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises(KeyboardInterrupt))
        network = enter_network(options, stack)
        plan = launches.Plan(
            options.nodes,
            options.processes_per_node,
            [network.address(node) for node in range(options.nodes)],
            meeting_port(options.port, network),
            options.elastic,
            options.slurm_variables,
        )
        commands = [launches.commands_for(options.command, plan, n) for n in range(plan.nodes)]
        events = events_of(options)
        texts = {event.text for event in events if event.text is not None}
        reports: SimpleQueue[NodeReport] = SimpleQueue()
        nodes = [stack.enter_context(Node(n, network, reports, texts)) for n in range(plan.nodes)]
        shared = environment_for_nodes(network)
        for node, node_commands in zip(nodes, commands, strict=True):
            print_commands(node, node_commands)
            with_variables = [(words, shared | own) for words, own in node_commands]
            node.send_order("start", commands=with_variables)
        say(ON_THE_CPU)
        supervisor = Supervisor(nodes, network, reports, events, options.elastic, options.silence)
        try:
            code = supervisor.wait_for_all()
        except KeyboardInterrupt:
            code = supervisor.stop()
        print_findings(nodes, network, code)
        return code


def read(arguments: list[str]):
    """Parse and check the options. Raises `UserError` if an option is invalid."""
    own, command = arguments, None
    if "--" in arguments:
        place = arguments.index("--")
        own, command = arguments[:place], arguments[place + 1 :]
    parser = make_parser()
    options, unknown = parser.parse_known_args(own)
    if unknown:
        if not unknown[0].startswith("-"):
            words = own[own.index(unknown[0]) :]
            raise UserError(f"put -- before a command: accel-demo nodes -- {shlex.join(words)}")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    check(options)
    if command is not None and not command:
        raise UserError("there is no command after --")
    if command is None:
        command = launches.default_command(options.elastic)
    options.command = command
    return options


def make_parser() -> Parser:
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
    help = "pull the last node's cable so many seconds after the start, or as soon as a node "
    help += 'prints a text such as "epoch 2/10" (needs namespaces)'
    add("--cut-after", type=seconds_or_text, metavar="WHEN", help=help)
    help = "plug the cable in again after S seconds"
    add("--cut-for", type=float, metavar="S", help=help)
    help = "kill the last node's processes so many seconds after the start, or as soon as a node "
    help += "prints a text"
    add("--kill-after", type=seconds_or_text, metavar="WHEN", help=help)
    help = "start the killed node's command again S seconds after the kill"
    add("--restart-after", type=float, metavar="S", help=help)
    help = "go on with fewer nodes if one fails: torchrun --nnodes 1:N"
    add("--elastic", action="store_true", help=help)
    help = "start the command as Slurm's srun does: a task per process, or one launcher per node, "
    help += "with the variables that srun sets"
    add("--slurm-variables", action="store_true", help=help)
    help = "if no node prints a line for S seconds, say what was seen so far (default: 60)"
    add("--silence", type=float, default=60, metavar="S", help=help)
    help = "port of node 0 on which the nodes meet (default: any free port)"
    add("--port", type=int, default=0, metavar="PORT", help=help)
    return parser


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
    if not 1 <= options.silence <= 86_400:
        raise UserError(f"--silence must be from 1 to 86400 seconds, got {options.silence:g}")
    cables.check("--rate", options.rate)
    cables.check("--delay", options.delay)
    for first, second in (("cut_after", "cut_for"), ("kill_after", "restart_after")):
        names = [f"--{name.replace('_', '-')}" for name in (first, second)]
        values = [getattr(options, name) for name in (first, second)]
        for name, value in zip(names, values, strict=True):
            if isinstance(value, float) and not 0 <= value <= 86_400:
                raise UserError(f"{name} must be from 0 to 86400 seconds, got {value:g}")
            if isinstance(value, str) and (not value.strip() or re.fullmatch(TIME, value.strip())):
                takes = "seconds without a unit, or a text that a node prints"
                raise UserError(f"{name} takes {takes}, got {value}")
        if values[0] is None and values[1] is not None:
            raise UserError(f"{names[1]} needs {names[0]}")
        if values[0] is not None and options.nodes < 2:
            raise UserError(f"{names[0]} needs at least two nodes")
    if options.network == "loopback" and (flag := flag_that_needs_namespaces(options)):
        raise UserError(f"{flag} needs network namespaces. Leave --network loopback out.")


def meeting_port(port: int, network: Loopback | Cables) -> int:
    """Return a port on which the nodes can meet: `port`, or any free port if `port` is 0."""
    if port and isinstance(network, Cables):
        return port  # nothing runs in the namespace of node 0 yet
    return free_port(port, advice="Choose another --port, or leave it out.")


def enter_network(options, stack: ExitStack) -> Loopback | Cables:
    """Return a network that works on this machine, and add it to `stack`.

    Raises `UserError` if an option needs namespaces, but this machine does not allow them.
    """
    if options.network != "loopback":
        try:
            return stack.enter_context(open_cables(options.nodes, options.rate, options.delay))
        except Unavailable as reason:
            if flag := flag_that_needs_namespaces(options):
                raise UserError(f"{flag} does not work here: {reason}") from None
            say(f"using loopback: {reason}")
    return Loopback()


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
        name = "SLURM_PROCID" if "SLURM_PROCID" in commands[0][1] else "RANK"
        line += f"  # ranks {', '.join(variables[name] for _, variables in commands)}"
    display(line)


def print_findings(nodes: list[Node], network: Loopback | Cables, code: int) -> None:
    """Print what was wrong with the launch, as far as it was seen. `code` is its exit code."""
    states = [node.look() for node in nodes]
    lines = findings.at_end(states)
    port_was_in_use = any(node.found_port_in_use for node in nodes)
    if port_was_in_use and code != 0 and isinstance(network, Loopback):
        lines.append(SHARED_PORTS)
    is_set_by_us = "ACCELERATE_USE_CPU" not in os.environ
    if is_set_by_us and findings.have_plain_accelerators(states) and not has_gpu():
        lines.append(CLONES_WITHOUT_GPUS)
    for line in lines:
        display(f"--- {line}")


def has_gpu() -> bool:
    """Return whether this machine has a GPU with which Accelerate connects processes."""
    import torch  # takes seconds, and is not needed by most launches

    return torch.accelerator.is_available() and not torch.backends.mps.is_available()


def events_of(options) -> list[NodeEvent]:
    """Return the events that the options ask for."""
    events = []
    for after, delay, start, end in (
        (options.cut_after, options.cut_for, "cut", "plug in"),
        (options.kill_after, options.restart_after, "kill", "start again"),
    ):
        if after is None:
            continue
        text, seconds = (after, 0.0) if isinstance(after, str) else (None, after)
        events.append(NodeEvent(start, seconds, text))
        if delay is not None:
            events.append(NodeEvent(end, seconds + delay, text))
    return events

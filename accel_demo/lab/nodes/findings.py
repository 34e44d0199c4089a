"""Describe what was seen on the nodes: who waits for whom, and which processes trained alone.

Each line states only what was observed. There is no line about a launch of which nothing is known.
"""

from collections import Counter
from collections.abc import Callable

from accel_demo.lab.nodes.members import Member, NodeState
from accel_demo.wording import byte_size, counted


def at_end(states: list[NodeState]) -> list[str]:
    """Return a line for each way in which processes were not connected across the nodes."""
    return [line for line in (_separate_groups(states), _clones(states)) if line]


def while_silent(states: list[NodeState], seconds: float) -> str:
    """Return a line about nodes that have printed no line for so many seconds."""
    connected = _counts(states, lambda member: member.is_running and member.was_connected)
    trained = _counts(states, lambda member: member.is_running and member.trains)
    if not (seen := waiting(states)):
        seen = _per_node("running", [state.processes for state in states])
        if any(connected):
            seen = f"{_per_node('connected', connected)}; {_per_node('have trained', trained)}"
    line = f"no node has printed a line for {seconds:.0f} s; {seen}"
    sent = [state.bytes_sent for state in states if state.bytes_sent is not None]
    if sent:
        each = [f"{byte_size(number)} by node {node}" for node, number in enumerate(sent)]
        line += f"; sent to other nodes so far: {', '.join(each)}"
    return line


def waiting(states: list[NodeState]) -> str:
    """Describe the processes that wait in `init_process_group`. Return "" if there are none."""
    ranks: dict[tuple[int, int], list[int]] = {}  # by world size and node
    for node, state in enumerate(states):
        for member in state.members:
            if member.is_running and member.waits_as:
                rank, size = member.waits_as
                ranks.setdefault((size, node), []).append(rank)
    if not ranks:
        return ""
    each = [f"{_listed(some)} of {size} on node {node}" for (size, node), some in ranks.items()]
    line = f"waiting in init_process_group: {', '.join(each)}"
    for size in sorted({size for size, _ in ranks}):
        used = Counter(rank for key, some in ranks.items() if key[0] == size for rank in some)
        if repeated := [rank for rank in used if used[rank] > 1]:
            line += f"; more than one process is {_listed(repeated)}"
        if absent := [rank for rank in range(size) if rank not in used]:
            line += f"; no process was seen waiting as {_listed(absent)}"
    return line


def have_plain_accelerators(states: list[NodeState]) -> bool:
    """Return whether `Accelerator()`, without `cpu=True`, has connected processes."""
    connected = (
        member.makes_plain_accelerator and member.num_processes != 1
        for state in states
        for member in state.members
    )
    return any(connected)


def _separate_groups(states: list[NodeState]) -> str:
    """Return a line if several nodes had process groups, and none had processes of two nodes."""
    connected = _counts(states, lambda member: member.was_connected)
    to_others = _counts(states, lambda member: member.was_connected_to_others)
    if any(to_others) or len(list(filter(None, connected))) < 2:
        return ""
    line = f"{_per_node('separate process groups', connected)}; none had processes of two nodes"
    if all(state.bytes_sent == 0 for state in states):
        line += ", and the nodes sent each other 0 bytes"
    return line


def _clones(states: list[NodeState]) -> str:
    """Return a line if several processes trained, each of them alone."""
    alone = _counts(states, lambda member: member.trains and _is_alone(member))
    if sum(alone) < 2 or alone != _counts(states, lambda member: member.trains):
        return ""
    if any(_counts(states, lambda member: member.num_processes == 1)):
        return f"{_per_node('trained alone', alone)}; Accelerator() counted 1 process in each"
    return f"{_per_node('trained alone', alone)}; torch.distributed did not connect them"


def _is_alone(member: Member) -> bool:
    if member.num_processes is not None:
        return member.num_processes == 1  # even if torch.distributed is connected
    return not member.was_connected


def _counts(states: list[NodeState], condition: Callable[[Member], bool]) -> list[int]:
    """Return how many processes of each node meet a condition."""
    return [sum(map(condition, state.members)) for state in states]


def _per_node(what: str, counts: list[int]) -> str:
    """Return a text such as "connected: 2 processes on node 0, 2 on node 1"."""
    each = [f"{number} on node {node}" for node, number in enumerate(counts)]
    each[0] = f"{counted(counts[0], 'process')} on node 0"
    return f"{what}: {', '.join(each)}"


def _listed(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"

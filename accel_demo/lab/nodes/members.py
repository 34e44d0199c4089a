"""What the processes of one node have done with torch."""

from dataclasses import dataclass, field
from heapq import merge


@dataclass
class Member:
    """A process that has joined a process group, made an Accelerator, or trained."""

    pid: int
    is_running: bool
    waits_as: tuple[int, int] | None = None  # rank and world size, in `init_process_group`
    was_connected: bool = False  # to at least one other process
    is_group_on_node: bool = False  # all processes of its last group are on the same node
    was_connected_to_others: bool = False  # to a process of another node
    trains: bool = False
    makes_plain_accelerator: bool = False  # `Accelerator()`, without `cpu=True`
    num_processes: int | None = None  # of its Accelerator


@dataclass(frozen=True)
class NodeState:
    """What was seen on a node."""

    members: list[Member] = field(default_factory=list)
    processes: int = 0  # that run now
    bytes_sent: int | None = None  # to other nodes; None if this cannot be measured


def read_members(logs: list[list[dict]], running: list[int]) -> list[Member]:
    """Return the processes that have recorded events. `running` are process IDs.

    Each log has the events of one process, see `accel_demo/observer/processes.py`.

    `init_process_group` returns only after all ranks have called it. So if all of them have called
    it on this node before it returns, the whole group is on this node.
    """
    members = [Member(log[0]["pid"], log[0]["pid"] in running) for log in logs]
    pairs = [[(event, it) for event in log] for log, it in zip(logs, members, strict=True)]
    for event, member in merge(*pairs, key=lambda pair: pair[0]["time"]):
        match event["kind"]:
            case "connecting":
                known = event["rank"] is not None
                member.waits_as = (event["rank"], event["world"]) if known else None
                member.is_group_on_node = False
            case "not connected":
                member.waits_as = None
            case "connected":
                size = event["world"]
                waiting = [it for it in members if it.waits_as and it.waits_as[1] == size]
                if len({it.waits_as for it in waiting}) == size:
                    for each in waiting:
                        each.is_group_on_node = True
                if size > 1:
                    member.was_connected = True
                    member.was_connected_to_others |= not member.is_group_on_node
                member.waits_as = None
            case "accelerator":
                member.makes_plain_accelerator |= event["is_plain"]
                member.num_processes = event["processes"]
            case "step":
                member.trains = True
    return members

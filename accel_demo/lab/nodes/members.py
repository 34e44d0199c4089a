"""What the processes of one node have done with torch: the log of `agent/sitecustomize.py`."""

import json
from dataclasses import dataclass, field

LOG = "ACCEL_DEMO_NODE_LOG"  # the environment variable with the path of the log


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


def read_members(log: list[str], running: list[int]) -> list[Member]:
    """Return the processes that have written the lines of a log. `running` are process IDs.

    `init_process_group` returns only after all ranks have called it. So if all of them have called
    it on this node before it returns, the whole group is on this node.
    """
    members: dict[int, Member] = {}
    for line in log:
        event = json.loads(line)
        member = members.setdefault(event["pid"], Member(event["pid"], event["pid"] in running))
        match event["event"]:
            case "joins":
                member.waits_as = (event["rank"], event["world_size"]) if "rank" in event else None
                member.is_group_on_node = False
            case "fails to join":
                member.waits_as = None
            case "has joined":
                size = event["world_size"]
                waiting = [it for it in members.values() if it.waits_as and it.waits_as[1] == size]
                if len({it.waits_as for it in waiting}) == size:
                    for each in waiting:
                        each.is_group_on_node = True
                if size > 1:
                    member.was_connected = True
                    member.was_connected_to_others |= not member.is_group_on_node
                member.waits_as = None
            case "makes an Accelerator":
                member.makes_plain_accelerator = event["is_plain"]
                member.num_processes = event["num_processes"]
            case "trains":
                member.trains = True
    return list(members.values())

"""Read the collectives of this process from PyTorch's Flight Recorder.

It records every collective, also the all-reduces of DistributedDataParallel in C++, each with the
Python stack that started it. https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

import pickle
import sys

from . import processes
from .events import emit, guarded, is_own_file

# Files of libraries that pass a call on
_FORWARDING = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/utils.py",
    "/torch/utils/_contextlib.py",
    "/accelerate/utils/operations.py",
)


@guarded
def record() -> None:
    """Write one event with all recorded collectives."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        emit("collectives", collectives=recent())


@guarded
def counted() -> list[int] | None:
    """Return how often this process has connected, and how many collectives followed.

    Two ranks with equal numbers have not waited for each other in between. The second number is -1
    if the process is not connected. Returns None if the numbers are unknown.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return [processes.connections, -1]
    groups = dist.distributed_c10d._world.pg_map
    return [processes.connections, sum(each._get_sequence_number_for_group() for each in groups)]


def recent() -> list[dict]:
    """Return the recorded collectives, oldest first."""
    return [_fields_of(entry) for entry in entries(with_stacks=True)]


def entries(with_stacks: bool) -> list[dict]:
    """Return the recorder's latest entries as it stores them, oldest first."""
    dist, c10d = sys.modules["torch.distributed"], sys.modules["torch"]._C._distributed_c10d
    # NCCL records its calls in a separate recorder.
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    dump = c10d._dump_nccl_trace if is_nccl else c10d._dump_fr_trace
    return pickle.loads(dump(True, with_stacks, False)).get("entries", [])


def _fields_of(entry: dict) -> dict:
    places = [[each["filename"], each["line"], each["name"]] for each in entry["frames"]]
    own = [place for place in places if is_own_file(place[0])]
    callers = [place[0] for place in places if not place[0].endswith(_FORWARDING)]
    return {
        "id": entry["record_id"],
        "time": entry["time_created_ns"] / 1e9,
        "caller": callers[0] if callers else "",
        "group": entry["process_group"][0],
        "number": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        "name": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        "is_p2p": entry["is_p2p"],
        "sizes": entry["input_sizes"],
        "types": entry["input_dtypes"],
        "done": entry["retired"],
        "line": own[0] if own else None,
        "functions": [[place[0], place[2]] for place in own],
    }

"""Grade exercise 04: all-reduce with one to four processes, and see whose tensors are in the sum.

python tutorials/exercises/graders/04.py FILE
"""

import argparse
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path

from accel_demo.processes.launch import run_to_end
from accel_demo.wording import counted

WORLD_SIZES = (1, 2, 3, 4)
SHAPES = [(5,), (300, 1000)]  # of the tensors, one call after the other
# Seconds for the calls, once the processes have met, on a machine however busy: they take a tenth
# of one.
PATIENCE = float(os.environ.get("ACCEL_DEMO_PATIENCE", 30))
TIME_LIMIT = 120  # seconds for everything, on a machine however busy
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "scatter", "gather", "all_gather", "all_to_all"),
    *("reduce_scatter", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced"),
    # and under the names they have as methods of a group, such as dist.group.WORLD
    *("allreduce", "allgather", "alltoall", "alltoall_base", "_allgather_base"),
    *("_reduce_scatter_base", "all_gather_single", "reduce_scatter_single", "gather_single"),
    *("allreduce_coalesced", "allgather_coalesced", "gather_into_tensor"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)


def main(answer: Path) -> int:
    """Say what is wrong at the smallest world size where something is; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"python {shlex.quote(__file__)} {shlex.quote(str(answer))}"
        result = run_to_end(f"{program} --report {shlex.quote(folder)}", TIME_LIMIT)
        for world_size in WORLD_SIZES:
            files = [Path(folder, f"{world_size}-{rank}.json") for rank in range(world_size)]
            reports = [json.loads(file.read_text()) for file in files if file.exists()]
            where = f"with {counted(world_size, 'process')}"
            mistake = judge(reports, world_size)
            if mistake is None:
                print(f"wrong: {where} it broke off\n{result.stderr}")
                return 1
            if mistake:
                passed = f"right with {world_size - 1}, but " if world_size > 2 else ""
                print(f"wrong: {passed}{where} {mistake}")
                return 1
    print("right: with 1, 2, 3 and 4 processes everyone has the sum, from send and receive alone")
    return 0


def judge(reports: list[dict], world_size: int) -> str | None:
    """What the ranks of one launch have reported says of the function; None if it says nothing."""
    ended = [report for report in reports if report["end"]]
    if ended:  # what went wrong first is the mistake: the other ranks then miss somebody
        return min(ended, key=lambda report: report["at"])["end"]
    if len(reports) != world_size:
        return None
    if all(report["returned_sum"] for report in reports) and not reports[0]["is_sum"]:
        return "it returns the sum, but does not write it into the tensor: do it in place"
    right = [rank for rank, report in enumerate(reports) if report["is_sum"]]
    if len(right) == world_size:
        return ""
    if len(right) == 1:
        return f"rank {right[0]} alone has the sum: it has to get back to the others"
    if world_size > 1 and all(report["is_mean"] for report in reports):
        return "everyone has the mean, and not the sum"
    first = next(rank for rank in range(world_size) if rank not in right)
    return f"rank {first} ends with {reports[first]['has']}, and not with everyone's tensor once"


def report_all(answer: Path, folder: Path) -> None:
    """Call the learner's function at one world size after the other, until something is wrong."""
    from accel_demo.processes.group import run_in_group

    for world_size in WORLD_SIZES:
        run_in_group(report, world_size, answer, folder)  # ends here where a process does
        files = folder.glob(f"{world_size}-*.json")
        if not all(json.loads(file.read_text())["is_sum"] for file in files):
            return


def report(device, answer: Path, folder: Path) -> None:
    """One of the processes: what it found goes into a file. The first that fails ends them all."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {"end": "", "collective": "", "has": ""}
    found |= {"is_sum": True, "is_mean": True, "returned_sum": True}

    def write(end: str = "") -> None:
        found.update(end=end, at=time.time())
        file = folder / f"{world_size}-{rank}"
        file.write_text(json.dumps(found))
        file.rename(file.with_suffix(".json"))

    def give_up() -> None:
        waits = f"rank {rank} still waits after {PATIENCE:g} s"
        write(f"{waits}: which rank sends while which receives?")
        os._exit(1)

    watch = threading.Timer(PATIENCE, give_up)
    watch.daemon = True
    dist.barrier()
    watch.start()
    try:
        forbid_collectives(found)
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for shape in SHAPES:
            examine(module.all_reduce, shape, device, found)
    except BaseException as error:  # SystemExit too
        watch.cancel()
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        write(found["collective"] or f"it cannot be used: {what}")
        os._exit(1)
    watch.cancel()
    write()


def forbid_collectives(found: dict) -> None:
    """Let torch.distributed's collectives say that they were called, and fail."""
    import torch.distributed as dist

    def forbidden(name: str):
        def fail(*arguments, **options):
            found["collective"] = f"it calls torch.distributed's {name}: use send and recv alone"
            raise RuntimeError(name)

        return fail

    for name in COLLECTIVES:
        for place in (dist, dist.distributed_c10d, dist.ProcessGroup):
            if hasattr(place, name):
                setattr(place, name, forbidden(name))


def examine(all_reduce, shape: tuple, device, found: dict) -> None:
    """Call it once. Rank r has 10**r times 1, 2 or 3, so that digits say whose tensors are in."""
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    ones = (torch.arange(torch.Size(shape).numel(), device=device) % 3 + 1.0).reshape(shape)
    tensor, total = ones * 10**rank, ones * sum(10**other for other in range(world_size))
    returned = all_reduce(tensor)
    found["is_mean"] &= torch.allclose(tensor * world_size, total)
    found["returned_sum"] &= isinstance(returned, torch.Tensor) and torch.equal(returned, total)
    if not torch.equal(tensor, total):
        found["is_sum"] = False
        found["has"] = found["has"] or whose(tensor / ones, world_size)


def whose(counts, world_size: int) -> str:
    """The ranks whose tensors were added up, in words, from a tensor of equal numbers."""
    number = counts.flatten()[0].item()
    if not (counts == number).all() or number != int(number) or not 0 < number < 10**world_size:
        return "something that is no sum of tensors"
    digits = [int(digit) for digit in reversed(str(int(number)))]
    ranks = [rank for rank, digit in enumerate(digits) for _ in range(digit)]
    if len(ranks) == 1:
        return f"the tensor of rank {ranks[0]} alone"
    return f"the tensors of ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} alone"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="start the processes, and write here")
    options = parser.parse_args()
    if options.report:
        report_all(options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))

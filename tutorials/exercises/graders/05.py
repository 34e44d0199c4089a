"""Grade exercise 05: gather chunks on 2, 3 and 4 ranks, and look at the sums and at the messages.

python tutorials/exercises/graders/05.py FILE
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

TIME_LIMIT = 120  # seconds for everything; without a mistake it takes under ten
# Seconds for one all-gather, of a few numbers, on a machine however busy. It takes far under one.
PATIENCE = float(os.environ.get("ACCEL_DEMO_PATIENCE", 30))
WORLDS = (2, 3, 4)
LENGTHS = (12, 7, 2)  # one that divides, one that does not, one that leaves empty chunks


def main(answer: Path) -> int:
    """Say what is wrong on the first number of ranks where something is; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"python {shlex.quote(__file__)} {shlex.quote(str(answer))}"
        result = run_to_end(f"{program} --report {shlex.quote(folder)}", TIME_LIMIT)
        for world_size in WORLDS:
            if mistake := judge(Path(folder), world_size, result):
                print(f"wrong: on {world_size} ranks {mistake}")
                return 1
    print("right: on 2, 3 and 4 ranks all have every sum, and nobody has sent a byte too many")
    return 0


def judge(folder: Path, world_size: int, result) -> str:
    """What is wrong on this many ranks, from what each of them has reported; or nothing."""
    files = [folder / f"{world_size}-{rank}.json" for rank in range(world_size)]
    if not all(file.exists() for file in files):
        if "preamble.length" in result.stderr:  # gloo's words, and then it ends the process
            return "a message has more bytes than there are in the chunk it is received into"
        how = "did not end" if result.returncode is None else "broke off"
        return f"the all-gather {how}\n{result.stderr}"
    reports = [json.loads(file.read_text()) for file in files]
    # What went wrong first is the mistake: the other ranks then miss somebody.
    ended = [(report["at"], rank, report["end"]) for rank, report in enumerate(reports)]
    ended = sorted(one for one in ended if one[2])
    if ended:
        return f"rank {ended[0][1]} {ended[0][2]}"
    for number, length in enumerate(LENGTHS):
        where = f"and {length} elements,"
        for rank, report in enumerate(reports):
            if mistake := wrong_sum(report["cases"][number]["chunks"], world_size):
                return f"{where} rank {rank} {mistake}"
        for rank, report in enumerate(reports):
            if mistake := wrong_messages(report["cases"][number], rank, world_size):
                return f"{where} rank {rank} {mistake}"
    return ""


def wrong_sum(chunks: list[list[float]], world_size: int) -> str:
    """What is wrong with the chunks of a rank. Element i of rank r was 2 ** r * (i + 1)."""
    everyone, first = 2**world_size - 1, 0
    for index, chunk in enumerate(chunks):
        if not chunk:
            continue
        parts = {value / (first + offset + 1) for offset, value in enumerate(chunk)}
        first += len(chunk)
        if parts == {everyone}:
            continue
        part = parts.pop()
        if not parts and part < everyone and part == int(part):
            missing = [str(rank) for rank in range(world_size) if not int(part) >> rank & 1]
            return (
                f"has chunk {index} without the values of rank {', '.join(missing)}: in each step "
                "send the chunk that has come in the step before"
            )
        if not parts and part > everyone:
            return f"has counted values twice in chunk {index}: copy what comes, do not add it"
        for other in range(world_size):
            start = sum(map(len, chunks[:other]))
            if chunk == [everyone * (start + offset + 1) for offset in range(len(chunk))]:
                return f"has the sum of chunk {other} where chunk {index} should be"
        return f"has wrong numbers in chunk {index}: {chunk}"
    return ""


def wrong_messages(case: dict, rank: int, world_size: int) -> str:
    """What is wrong with the messages of a rank that ends with the right sums."""
    right = (rank + 1) % world_size
    for target, _ in case["sent"]:
        if target != right:
            return f"has sent to rank {target}: in a ring it sends to rank {right} alone"
    sent = sum(size for _, size in case["sent"])
    sizes = [8 * len(chunk) for chunk in case["chunks"]]
    budget = sum(sizes) - sizes[right]  # the one chunk that its neighbour has had from the start
    if sent > budget:
        return (
            f"has sent too many bytes: {sent}, where {world_size - 1} of its chunks have {budget}"
        )
    if sent < budget:
        return f"has sent {sent} of {budget} bytes over the wire: use nothing but the wire"
    return ""


def run(answer: Path, folder: Path) -> None:
    """Start the ranks, on fewer first, until a rank does not come to its end."""
    from accel_demo.processes.group import run_in_group

    for world_size in WORLDS:
        run_in_group(gather, world_size, answer, folder)
        reports = [json.loads(file.read_text()) for file in folder.glob(f"{world_size}-*.json")]
        if any(report["end"] for report in reports):
            return


def gather(device, answer: Path, folder: Path) -> None:
    """One rank: it reports the chunks and messages of each case, or how it ended before that."""
    import torch
    import torch.distributed as dist

    from accel_demo.anatomy.ring import reduce_scatter_ring, split
    from accel_demo.anatomy.wire import Wire

    rank, world_size = dist.get_rank(), dist.get_world_size()
    cases = []

    def report(end: str = "") -> None:
        content = json.dumps({"end": end, "at": time.time(), "cases": cases})
        (folder / f"{world_size}-{rank}.json").write_text(content)
        if end:
            os._exit(0)  # whoever waits for this rank learns of it

    waits = (
        f"still waits after {PATIENCE:g} s, for a message that nobody sends: where all ranks first "
        "send, and then receive, they wait for each other for ever"
    )
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for length in LENGTHS:
            values = torch.arange(1, length + 1, dtype=torch.float64, device=device) * 2**rank
            chunks, wire = split(values, world_size), Wire()
            reduce_scatter_ring(chunks, Wire())
            dist.barrier()
            watch = threading.Timer(PATIENCE, report, [waits])
            watch.start()
            module.all_gather(chunks, wire)
            watch.cancel()
            dist.barrier()
            parts = [part.tolist() for part in split(values, world_size)]
            sent = [(message.target, message.size) for message in wire.sent]
            cases.append({"chunks": parts, "sent": sent})
    except BaseException as error:  # a learner's sys.exit too
        what = str(error).split("\n")[0]
        report(f"cannot go on: {type(error).__name__}{f': {what}' if what else ''}")
    report()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="run the ranks, and let them write here")
    options = parser.parse_args()
    if options.report:
        run(options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))

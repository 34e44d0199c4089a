"""Grade exercise 44: run the answer on simulated nodes, and judge what the ranks do, in order.

python tutorials/exercises/graders/44.py FILE

nodes_44.py simulates the nodes and logs what happens. judge_44.py judges the log.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import grading
from grading import Wrong
from judge_44 import (
    MISTAKES,
    events_named,
    judge_end,
    judge_order,
    places,
    remark,
    stuck,
    waits_inside_block,
)
from nodes_44 import ENDED, WAITING, Event, Layout, Log, run_rank, states

from accel_demo.processes.environment import QUIET, RANK_VARIABLES
from accel_demo.processes.launch import free_port, start_method
from accel_demo.wording import counted

PATIENCE = 15  # seconds for one run; a correct answer takes about one second
STUCK_AFTER = 0.5  # seconds without an event, if every rank waits for another
LAYOUTS = (Layout((2, 2)), Layout((3, 1), is_last_rank_first=True))
# Fork the ranks from a server that has already imported torch.
PROCESSES = multiprocessing.get_context(start_method())


def judge_all(answer: Path) -> str:
    start_server()
    deadline = time.monotonic() + limit("ACCEL_DEMO_TIME_LIMIT", grading.TIME_LIMIT)
    more = ""
    for number, layout in enumerate(LAYOUTS):
        try:
            with tempfile.TemporaryDirectory() as folder:
                events = run_and_judge(answer, Path(folder).resolve(), layout, deadline)
            more = more or remark(events)
        except Wrong as mistake:
            if number == 0:
                raise
            counts = [
                f"{counted(n, 'rank')} on node {i}" for i, n in enumerate(layout.ranks_per_node)
            ]
            end = "" if str(mistake).endswith("?") else "."
            raise Wrong(
                f"with {' and '.join(counts)}, {mistake}{end} (It is correct with 2 ranks on each "
                "node.)",
                mistake.read,
            ) from None
    return (
        "each action is done by the right ranks, in the right order, with 2 ranks on each node and "
        f"with 3 on one and 1 on the other{more}"
    )


def start_server() -> None:
    """Start the server from which the ranks are forked, and wait until it has imported torch."""
    os.environ.update(QUIET)
    for name in (*RANK_VARIABLES, "GROUP_RANK"):
        os.environ.pop(name, None)
    if start_method() == "forkserver":
        PROCESSES.set_forkserver_preload(["accelerate", "torch.distributed"])
    first = PROCESSES.Process(target=int)
    first.start()
    first.join()


def limit(variable: str, default: float) -> float:
    return float(os.environ.get(variable, default))


def run_and_judge(answer: Path, folder: Path, layout: Layout, deadline: float) -> list[Event]:
    """Run the answer once on every rank. Return the log, or raise `Wrong` for a mistake."""
    for name in ("shared", "reports", *(f"node-{n}" for n in range(len(layout.ranks_per_node)))):
        (folder / name).mkdir()
    events, exit_codes = run_ranks(answer, folder, layout, deadline)
    judge_order(events, layout)
    rank_states = states(events, layout.world_size)
    for rank, code in enumerate(exit_codes):
        if code is not None and rank_states[rank] != ENDED:
            raise Wrong(f"rank {rank} exited early with exit code {code}")
    for event in events_named(events, "fail"):  # such as a lost connection
        raise Wrong(event.details["mistake"])
    if WAITING in rank_states and set(rank_states) <= {WAITING, ENDED}:
        raise stuck(events, rank_states)
    if None in exit_codes:
        if mistake := waits_inside_block(events, layout.world_size):
            raise mistake
        seconds = limit("ACCEL_DEMO_PATIENCE", PATIENCE)
        raise Wrong(
            f"it has not finished after {seconds:g} s: {places(events, rank_states)}", MISTAKES
        )
    for rank, report in enumerate(grading.read_reports(folder / "reports").values()):
        if [seen["connected"] for seen in report["seen"]] != [layout.world_size]:
            raise RuntimeError(f"rank {rank} is not connected to the others")
    judge_end(events, layout)
    return events


def run_ranks(
    answer: Path, folder: Path, layout: Layout, deadline: float
) -> tuple[list[Event], list[int | None]]:
    """Start all ranks, and wait for them. Return the events and the exit code of each rank.

    As soon as one rank fails, or every rank waits for another, kill all of them. The exit code of a
    rank is None if it was killed.
    """
    log, count, since = Log(folder / "log"), 0, time.monotonic()
    arguments = (answer, folder, layout, free_port())
    ranks = [
        PROCESSES.Process(target=run_rank, args=(rank, *arguments))
        for rank in range(layout.world_size)
    ]
    for process in ranks:
        process.start()
    end = min(time.monotonic() + limit("ACCEL_DEMO_PATIENCE", PATIENCE), deadline)
    while True:
        time.sleep(0.02)
        exit_codes = [process.exitcode for process in ranks]
        events = log.events()  # read before killing, which causes errors in other ranks
        rank_states = states(events, layout.world_size)
        if len(events) != count:
            count, since = len(events), time.monotonic()
        is_stuck = WAITING in rank_states and set(rank_states) <= {WAITING, ENDED}
        is_lost = any(
            code is not None and (code or state != ENDED)
            for code, state in zip(exit_codes, rank_states, strict=True)
        )
        if (
            None not in exit_codes
            or is_lost
            or (is_stuck and time.monotonic() - since > STUCK_AFTER)
            or time.monotonic() > end
        ):
            break
    for process in ranks:
        process.kill()
        process.join()
    return events, exit_codes


if __name__ == "__main__":
    options = grading.parser_of(__doc__).parse_args()
    sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))

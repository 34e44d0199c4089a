"""Grade exercise 44: run the answer on simulated nodes, and judge what the ranks do, in order.

nodes_44.py simulates the nodes and logs what happens. judge_44.py judges the log.
"""

import sys
import tempfile
import time
from pathlib import Path

import grading
import judge_44
from grading import NotFinished, Wrong, limit, prefixed
from nodes_44 import ENDED, WAITING, Event, Layout, Log, run_rank, states
from ranks import run_ranks, start_server

from accel_demo.processes.launch import free_port

PATIENCE = 15  # seconds for one run; a correct answer takes about one second
STUCK_AFTER = 0.5  # seconds without an event, if every rank waits for another
LAYOUTS = (Layout((2, 2)), Layout((3, 1), is_last_rank_first=True))


def judge_all(answer: Path) -> str:
    start_server()
    deadline = time.monotonic() + limit("ACCEL_DEMO_TIME_LIMIT", grading.TIME_LIMIT)
    where, more, passed = "", "", ""
    for layout in LAYOUTS:
        with prefixed(where, passed), tempfile.TemporaryDirectory() as folder:
            events = run_and_judge(answer, Path(folder).resolve(), layout, deadline)
        more = more or judge_44.remark(events)
        where = "with 3 ranks on node 0 and 1 rank on node 1, "
        passed = "(It is correct with 2 ranks on each node.)"
    return (
        "each action is done by the right ranks, in the right order, with 2 ranks on each node and "
        f"with 3 on one and 1 on the other{more}"
    )


def run_and_judge(answer: Path, folder: Path, layout: Layout, deadline: float) -> list[Event]:
    """Run the answer once on every rank. Return the log, or raise `Wrong` for a mistake."""
    for name in ("shared", "reports", *(f"node-{n}" for n in range(len(layout.ranks_per_node)))):
        (folder / name).mkdir()
    events, exit_codes = run(answer, folder, layout, deadline)
    judge_44.judge_order(events, layout)
    rank_states = states(events, layout.world_size)
    for rank, code in enumerate(exit_codes):
        if code is not None and rank_states[rank] != ENDED:
            raise Wrong(f"rank {rank} exited early with exit code {code}")
    for event in judge_44.events_named(events, "fail"):  # such as a lost connection
        raise Wrong(event.details["mistake"])
    if WAITING in rank_states and set(rank_states) <= {WAITING, ENDED}:
        raise judge_44.stuck(events, rank_states)
    if None in exit_codes:
        if mistake := judge_44.waits_inside_block(events, layout.world_size):
            raise mistake
        seconds = limit("ACCEL_DEMO_PATIENCE", PATIENCE)
        raise NotFinished(
            f"it has not finished after {seconds:g} s: {judge_44.places(events, rank_states)}",
            judge_44.MISTAKES,
        )
    for rank, report in enumerate(grading.read_reports(folder / "reports").values()):
        if [seen["connected"] for seen in report["seen"]] != [layout.world_size]:
            raise RuntimeError(f"rank {rank} is not connected to the others")
    judge_44.judge_end(events, layout)
    return events


def run(
    answer: Path, folder: Path, layout: Layout, deadline: float
) -> tuple[list[Event], list[int | None]]:
    """Run all ranks. Return the events and the exit code of each rank.

    As soon as one rank fails, or every rank waits for another, kill all of them. The exit code of a
    rank is None if it was killed.
    """
    log, events, since = Log(folder / "log"), [], time.monotonic()

    def is_over(exit_codes: list[int | None]) -> bool:
        nonlocal events, since
        before, events = events, log.events()  # read before killing, which causes more errors
        rank_states = states(events, layout.world_size)
        if len(events) != len(before):
            since = time.monotonic()
        is_stuck = WAITING in rank_states and set(rank_states) <= {WAITING, ENDED}
        is_lost = any(
            code is not None and (code or state != ENDED)
            for code, state in zip(exit_codes, rank_states, strict=True)
        )
        return is_lost or (is_stuck and time.monotonic() - since > STUCK_AFTER)

    end = min(time.monotonic() + limit("ACCEL_DEMO_PATIENCE", PATIENCE), deadline)
    arguments = (answer, folder, layout, free_port())
    exit_codes = run_ranks(run_rank, layout.world_size, *arguments, end=end, is_over=is_over)
    return events, exit_codes


if __name__ == "__main__":
    options = grading.read(grading.parser_of(__doc__))
    sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))

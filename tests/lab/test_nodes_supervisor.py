"""Test how `accel-demo nodes` reacts to reports from its nodes, without starting any."""

import time
from queue import SimpleQueue

import pytest

from accel_demo.lab import cables
from accel_demo.lab.nodes import supervisor
from accel_demo.lab.nodes.members import NodeState
from accel_demo.lab.nodes.node import NodeReport
from accel_demo.lab.nodes.supervisor import NodeEvent, Supervisor

KILL = NodeEvent("kill", 0)


class RecordedNode:
    """Stands in for a node, and records its orders."""

    def __init__(self, rank: int):
        self.rank, self.orders = rank, []
        self.printed_at = time.monotonic()

    def look(self) -> NodeState:
        return NodeState()

    def send_order(self, what: str) -> None:
        self.orders.append(what)


def supervisor_of_two(reports=(), events=(), elastic=False) -> Supervisor:
    queue = SimpleQueue()
    for report in reports:
        queue.put(report)
    nodes = [RecordedNode(0), RecordedNode(1)]
    return Supervisor(nodes, cables.Loopback(), queue, list(events), elastic, 60)


def exited(*codes: tuple[int, int]) -> list[NodeReport]:
    """Return reports from (rank, exit code) pairs."""
    return [NodeReport(rank, exit_code=code) for rank, code in codes]


def supervise(reports: list, events: list, elastic: bool) -> tuple[int, list]:
    """Return the exit code, and the orders of node 1, if the nodes send these reports."""
    both = supervisor_of_two(reports, events, elastic)
    return both.wait_for_all(), both.nodes[1].orders


def test_an_elastic_launch_goes_on_without_a_node_that_is_killed(capsys):
    assert supervise(exited((0, 0)), [KILL], elastic=True) == (0, ["kill"])
    assert capsys.readouterr().out == "--- node 1 is killed\n"
    assert supervise(exited((1, 1), (0, 0)), [], elastic=True) == (0, [])
    assert supervise(exited((1, 0), (0, 1)), [], elastic=True) == (1, [])


def test_a_node_that_is_killed_makes_other_launches_fail():
    assert supervise(exited((0, 0)), [KILL], elastic=False) == (1, ["kill"])


def test_an_event_waits_until_a_node_has_printed_its_text(capsys):
    events = [NodeEvent("kill", 0, "step 5:"), NodeEvent("start again", 0.2, "step 5:")]
    both = supervisor_of_two([NodeReport(0, text="step 5:")], events)
    both.handle_report(both.reports.get())
    printed_at = both.times["step 5:"]
    both.handle_report(NodeReport(1, text="step 5:"))
    assert both.times["step 5:"] == printed_at  # only the first node counts
    assert both.is_due(events[0]) and not both.is_due(events[1])
    time.sleep(0.2)
    assert both.is_due(events[1])
    for event in events:
        both.apply_event(event.name)
    assert both.nodes[1].orders == ["kill", "start again"]
    assert both.running_nodes() == both.nodes


def test_events_that_do_not_happen_are_reported(capsys):
    events = [NodeEvent("kill", 0, "step 5:"), NodeEvent("start again", 3, "step 5:")]
    assert supervise(exited((0, 0), (1, 0)), events, elastic=False) == (0, [])
    assert capsys.readouterr().err == (
        '--kill-after had no effect: no node printed "step 5:" in time\n'
        '--restart-after had no effect: no node printed "step 5:" in time\n'
    )
    assert supervise(exited((0, 0), (1, 0)), [NodeEvent("cut", 99)], elastic=False) == (0, [])
    assert capsys.readouterr().err == "--cut-after had no effect: the launch ended earlier\n"


def test_an_elastic_launch_ends_with_node_0_even_if_a_lost_node_would_start_again(capsys):
    events = [KILL, NodeEvent("start again", 60)]
    started = time.monotonic()
    assert supervise(exited((0, 0)), events, elastic=True) == (0, ["kill"])
    assert time.monotonic() - started < 10
    expected = "--restart-after had no effect: the launch ended earlier\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("elastic", [False, True])
def test_nodes_that_still_run_after_the_deadline_are_named(elastic, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "FAILURE_TIMEOUT", 0.2)
    code = 0 if elastic else 3
    assert supervise(exited((0, code)), [], elastic) == (0 if elastic else 1, [])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "killed node 1: it was still running 0.2 s after node 0 had exited"


def test_a_node_that_has_exited_is_neither_killed_nor_started_again(capsys):
    both = supervisor_of_two(exited((0, 0)))
    both.codes[1] = 0
    both.apply_event("kill")
    both.apply_event("start again")
    printed = capsys.readouterr()
    assert both.nodes[1].orders == [] and printed.out == ""
    assert printed.err == "--kill-after had no effect: node 1 had already exited\n"
    assert both.wait_for_all() == 0


def test_ctrl_c_waits_only_for_nodes_that_still_run():
    both = supervisor_of_two([NodeReport(0, text="x"), *exited((0, 0))], elastic=True)
    both.codes[1] = 0
    started = time.monotonic()
    assert both.stop() == 130 and time.monotonic() - started < supervisor.STOP_TIMEOUT / 2
    assert both.nodes[0].orders == ["stop"] and both.nodes[1].orders == []

"""Test an elastic launch with two agents, one of which is killed and started again."""

import json
import random
import re
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from accel_demo.processes.cleanup import kill_all, kill_tree
from accel_demo.processes.launch import free_port
from tests.conftest import (
    left_behind,
    processes_below_this_one,
    run_training,
    start_process,
)
from tests.core.test_resume import train_lines
from tests.processes.test_stop_and_kill import same_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# An epoch has 32 micro-batches on one process, or 16 on each of two processes.
FLAGS = "--dataset synthetic --model tiny_cnn --train-samples 256 --test-samples 20 --batch-size 8 "
FLAGS += "--epochs 6 --dropout 0.2 --augment --log-every 1 --keep-last 999 --checkpoint-every 5 "
FLAGS = (FLAGS + "--collective-timeout 20").split()
FIRST_KILL = 7  # steps: later than the first checkpoint
PROGRAM = "tests/core/elastic_samples.py"


class ElasticLaunch:
    """An elastic launch on this machine, with one process per agent."""

    def __init__(self, run: Path):
        self.run, self.port, self.before = run, free_port(), processes_below_this_one()
        self.output = open(run.with_suffix(".txt"), "a+")
        self.agents: dict[int, subprocess.Popen] = {}
        for node in (0, 1):
            self.start(node)

    def start(self, node: int) -> None:
        """Start the agent of a node. Node 0 hosts the store in which the agents meet."""
        # The agents wait 10 s for a node that is missing, and notice its death after 6 s.
        settings = f"last_call_timeout=10,keep_alive_interval=2,is_host={int(node == 0)}"
        command = "torchrun --nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-id test "
        command += f"--rdzv-endpoint 127.0.0.1:{self.port} --rdzv-conf {settings} "
        self.agents[node] = start_process(
            [*command.split(), "--nproc-per-node", "1", PROGRAM, *FLAGS]
            + ["--resume", "auto", "--run-dir", self.run],
            self.output,
            self.output,
            real=True,
            new_session=True,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    def kill(self, node: int) -> None:
        """Kill the agent and its worker, as if the machine had lost its power."""
        kill_tree(self.agents[node])
        self.agents.pop(node).wait(10)

    def reach(self, steps: int, processes: int) -> None:
        """Wait until the run has trained at least `steps` new steps with this world size."""
        first, deadline = None, time.monotonic() + 100
        while True:
            environment = self.run / "environment.json"
            if environment.exists() and f'"processes": {processes},' in environment.read_text():
                lines = train_lines(self.run)
                first = len(lines) if first is None else first
                if len(lines) >= first + steps:
                    return
            assert time.monotonic() < deadline, self.printed()
            assert all(agent.poll() is None for agent in self.agents.values()), self.printed()
            time.sleep(0.01)

    def end(self) -> None:
        """Wait for the agents to exit with code 0, and check that they left nothing behind."""
        codes = [agent.wait(150) for agent in self.agents.values()]
        orphans = left_behind(self.before)
        assert not any(codes) and not orphans, (codes, orphans, self.printed())

    def printed(self) -> str:
        self.output.seek(0)
        return self.output.read()


@pytest.fixture
def elastic(tmp_path):
    launches = []

    def elastic(name: str) -> ElasticLaunch:
        launches.append(ElasticLaunch(tmp_path / name))
        return launches[-1]

    yield elastic
    for launch in launches:
        kill_all(processes_below_this_one() - launch.before)
        for agent in launch.agents.values():
            agent.wait(10)
        launch.output.close()


def starts_of(run: Path) -> list[dict]:
    """Return what each start has recorded, in the order of the starts.

    `ranks` contains the micro-batches of each rank as [epoch, indices].
    """
    starts = {}
    for path in (run / "samples").iterdir():
        header, *batches = map(json.loads, path.read_text().splitlines())
        starts.setdefault(header["start"], header | {"ranks": []})["ranks"].append(batches)
    starts = [starts[time] for time in sorted(starts)]
    assert all(len(start["ranks"]) == start["processes"] for start in starts)
    return starts


def images_by_epoch(starts: list[dict]) -> dict[int, list[int]]:
    """Return the images used in each epoch, without steps that were lost and trained again."""
    used = defaultdict(list)
    ends = [tuple(start["checkpoint"]) for start in starts[1:]] + [(float("inf"), 0)]
    for start, end in zip(starts, ends, strict=True):
        for batches in start["ranks"]:
            position = [start["epoch"], start["batches"]]
            for epoch, indices in batches:
                position = [epoch, position[1] + 1 if epoch == position[0] else 1]
                if (epoch, position[1] * start["processes"]) <= end:
                    used[epoch] += indices
    return used


def check_samples(launch: ElasticLaunch) -> None:
    """Check that each epoch used every image once, except for those that the run left out."""
    left_out = defaultdict(int)
    for images, epoch in re.findall(r"leaves out (\d+) images of epoch (\d+)", launch.printed()):
        left_out[int(epoch) - 1] += int(images)
    used = images_by_epoch(starts_of(launch.run))
    for epoch in range(6):
        assert len(used[epoch]) == len(set(used[epoch])) == 256 - left_out[epoch], epoch
        assert left_out[epoch] in (0, 8)


def test_a_killed_agent_that_returns_in_time_leads_to_the_same_weights(elastic, tmp_path):
    launch = elastic("run")
    launch.reach(random.SystemRandom().randint(FIRST_KILL, 40), processes=2)
    launch.kill(1)
    launch.start(1)
    launch.end()
    starts = starts_of(launch.run)
    assert [start["processes"] for start in starts] == [2, 2], launch.printed()
    check_samples(launch)
    undisturbed = tmp_path / "undisturbed"
    result = run_training("accel_demo/train.py", [*FLAGS, "--run-dir", undisturbed], 2)
    assert result.returncode == 0 and "2 processes on cpu" in result.stdout
    assert same_weights(launch.run, undisturbed)


def test_a_run_continues_with_one_process_and_grows_when_the_agent_returns(elastic):
    launch = elastic("run")
    launch.reach(random.SystemRandom().randint(FIRST_KILL, 20), processes=2)
    launch.kill(1)
    launch.reach(random.SystemRandom().randint(FIRST_KILL, 20), processes=1)
    launch.start(1)
    launch.end()
    sizes = [start["processes"] for start in starts_of(launch.run)]
    assert sizes == [2, 1, 2], launch.printed()
    assert "saved with 2 processes, resuming with 1" in launch.printed()
    assert "saved with 1 process, resuming with 2" in launch.printed()
    check_samples(launch)


def test_an_elastic_launch_needs_a_run_folder_with_a_fixed_name(start):
    command = "torchrun --standalone --nnodes 1:1 --nproc-per-node 1 accel_demo/train.py"
    result = start([*command.split(), "--dataset", "synthetic"], real=True)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "this launch can change its number of processes" in line and "--run-dir" in line

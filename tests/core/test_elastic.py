"""Test an elastic launch with two agents, one of which is killed and started again."""

import random
import re
from collections import defaultdict
from pathlib import Path

import pytest

from accel_demo.processes.cleanup import kill_tree
from accel_demo.processes.launch import free_port
from tests.conftest import train_in
from tests.core.recorded_samples import starts_of
from tests.processes.test_stop_and_kill import Launch
from tests.runs import lines_of, read, same_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# An epoch has 32 micro-batches on one process, or 16 on each of two processes.
FLAGS = "--dataset synthetic --model tiny_cnn --train-samples 256 --test-samples 20 --batch-size 8 "
FLAGS += "--epochs 6 --dropout 0.2 --augment --log-every 1 --keep-last 999 --checkpoint-every 5 "
FLAGS = (FLAGS + "--collective-timeout 20").split()
FIRST_KILL = 7  # steps: later than the first checkpoint
PROGRAM = "tests/core/recorded_samples.py"
SLOWNESS = "0.08"  # seconds per micro-batch, so that the test can interrupt the run


class ElasticLaunch(Launch):
    """An elastic launch on this machine, with one process per agent."""

    def __init__(self, run: Path):
        super().__init__(run)
        self.port = free_port()
        for node in (0, 1):
            self.start_agent(node)

    def start_agent(self, node: int) -> None:
        """Start the agent of a node. Node 0 hosts the store in which the agents meet."""
        # The agents wait 10 s for a node that is missing, and notice its death after 6 s.
        settings = f"last_call_timeout=10,keep_alive_interval=2,is_host={int(node == 0)}"
        command = "torchrun --nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-id test "
        command += f"--rdzv-endpoint 127.0.0.1:{self.port} --rdzv-conf {settings} "
        command += f"--nproc-per-node 1 {PROGRAM} --resume auto"
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SLOWNESS": SLOWNESS}
        self.start(node, [*command.split(), *FLAGS], real=True, **variables)

    def kill_agent(self, node: int) -> None:
        """Kill the agent and its worker, as if the machine had lost its power."""
        kill_tree(self.processes[node])
        self.processes.pop(node).wait(10)

    def reach_with(self, processes: int, steps: int) -> None:
        """Wait until the run has trained at least `steps` new steps with this world size."""
        environment, seen = self.run / "environment.json", []

        def is_reached() -> bool:
            if environment.exists() and read(environment)["processes"] == processes:
                seen.append(len(lines_of(self.run, "train_loss")))
            return bool(seen) and seen[-1] >= seen[0] + steps

        self.wait_until(is_reached)


@pytest.fixture
def elastic(tmp_path):
    launch = ElasticLaunch(tmp_path / "run")
    yield launch
    launch.close()


def images_by_epoch(starts: list[dict]) -> dict[int, list[int]]:
    """Return the images used in each epoch, without steps that were lost and trained again."""
    used = defaultdict(list)
    ends = [tuple(start["checkpoint"]) for start in starts[1:]] + [(float("inf"), 0)]
    for start, end in zip(starts, ends, strict=True):
        for batches in start["ranks"].values():
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
    elastic.reach_with(processes=2, steps=random.SystemRandom().randint(FIRST_KILL, 40))
    elastic.kill_agent(1)
    elastic.start_agent(1)
    assert elastic.end(150) == 0, elastic.printed()
    starts = starts_of(elastic.run)
    assert [start["processes"] for start in starts] == [2, 2], elastic.printed()
    check_samples(elastic)
    undisturbed = train_in(tmp_path / "undisturbed", "train.py", *FLAGS, processes=2)
    assert same_weights(elastic.run, undisturbed)


def test_a_run_continues_with_one_process_and_grows_when_the_agent_returns(elastic):
    elastic.reach_with(processes=2, steps=random.SystemRandom().randint(FIRST_KILL, 20))
    elastic.kill_agent(1)
    elastic.reach_with(processes=1, steps=random.SystemRandom().randint(FIRST_KILL, 20))
    elastic.start_agent(1)
    assert elastic.end(150) == 0, elastic.printed()
    sizes = [start["processes"] for start in starts_of(elastic.run)]
    assert sizes == [2, 1, 2], elastic.printed()
    assert "saved with 2 processes, resuming with 1" in elastic.printed()
    assert "saved with 1 process, resuming with 2" in elastic.printed()
    check_samples(elastic)


def test_an_elastic_launch_needs_a_run_folder_with_a_fixed_name(start):
    command = "torchrun --standalone --nnodes 1:1 --nproc-per-node 1 accel_demo/train.py"
    result = start([*command.split(), "--dataset", "synthetic"], real=True)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "this launch can change its number of processes" in line and "--run-dir" in line

"""Page 35: what its transcript shows about kills, saves and lost steps.

The kills hit different steps in every recording, so the tests compute what to expect from it.
"""

import re
import shutil
from dataclasses import dataclass

import pytest
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from accel_demo.run.manifest import MANIFEST, SEAL
from tests.pages.pages import TUTORIALS, transcript

PAGE = (TUTORIALS / "35_complete_or_absent.md").read_text()
((COMMAND, OUTPUT),) = transcript("crash").items()
LAUNCHES = [line for line in OUTPUT.splitlines() if line.startswith("launch ")]
SAVE_EVERY = int(re.search(r"--checkpoint-every (\d+)", OUTPUT)[1])
STEPS = int(re.search(r"^(\d+) steps; training", OUTPUT, re.MULTILINE)[1])


@dataclass
class Kill:
    phase: str  # such as "during a save"
    reached: int  # the last step of the killed launch
    resumed_after: int  # where the next launch that trained a step started

    @property
    def lost_steps(self) -> int:
        return self.reached - self.resumed_after


def kills_in(launches: list[str]) -> list[Kill]:
    """Read the kills from the lines about the launches, of which the last one was not killed."""
    kills, start = [], 0
    for line in reversed(launches):
        position = re.search(r"(?:from the beginning|after step (\d+)), reached step (\d+)", line)
        if kill := re.search(r"killed rank \d (during a save|in a step|during start-up)", line):
            kills.insert(0, Kill(kill[1], int(position[2]) if position else start, start))
        if position:
            start = int(position[1] or 0)
    return kills


KILLS = kills_in(LAUNCHES)


def test_the_kills_are_read_from_the_launches():
    """In this order, a launch that is killed during start-up follows a kill during a save."""
    launches = [
        "launch 1: started from the beginning, reached step 2, then killed rank 1 in a step",
        "launch 2: started from the beginning, reached step 6 (2 steps replayed), "
        "then killed rank 0 during a save (planned: in a step)",
        "launch 3: killed rank 0 during start-up",
        "launch 4: resumed after step 3, reached step 9 (3 steps replayed), then finished",
    ]
    assert kills_in(launches) == [
        Kill("in a step", 2, 0),
        Kill("during a save", 6, 3),
        Kill("during start-up", 3, 3),
    ]


def test_the_page_shows_the_command_that_recorded_its_transcript():
    assert COMMAND.split(" --plot ")[0] in PAGE.split("## See")[0]
    assert f"$ {COMMAND}\n{OUTPUT.strip()}\n```" in PAGE


def test_the_page_describes_the_recorded_run():
    text = " ".join(PAGE.split())
    word = ["one", "two", "three", "four", "five", "six"][SAVE_EVERY - 1]
    for claim in (
        f"A run of {STEPS} optimizer steps saves a checkpoint every {word} steps.",
        f"starts {word} steps before the step that was being saved",
        f"each kill during a save cost {word} steps, and the other kills cost fewer",
    ):
        assert claim in text


def test_the_killed_run_ends_with_the_same_weights():
    tensors = len(make_model(TrainConfig()).state_dict())
    assert f"final weights: bitwise equal in all {tensors} tensors" in OUTPUT
    assert f"metrics: equal in {STEPS} of {STEPS} steps" in OUTPUT
    assert "damaged checkpoints used: 0" in OUTPUT
    assert "always from the newest complete checkpoint" in OUTPUT


def test_every_launch_that_trained_a_step_had_connected_both_processes():
    processes, connected, launches = re.search(
        r"^connected: (\d+) processes in (\d+) of (\d+) launches$", OUTPUT, re.MULTILINE
    ).groups()
    trained = [line for line in LAUNCHES if "reached step" in line]
    assert (processes, int(launches)) == ("2", len(LAUNCHES))
    assert 0 < len(trained) <= int(connected) <= len(LAUNCHES)


def test_a_kill_during_a_save_costs_all_steps_since_the_last_checkpoint_and_others_fewer():
    during_saves = [kill for kill in KILLS if kill.phase == "during a save"]
    others = [kill for kill in KILLS if kill.phase != "during a save"]
    assert during_saves and others and len(KILLS) == len(LAUNCHES) - 1
    assert all(kill.reached % SAVE_EVERY == 0 for kill in during_saves)
    assert {kill.lost_steps for kill in during_saves} == {SAVE_EVERY}
    assert all(kill.lost_steps < SAVE_EVERY for kill in others)
    assert all(kill.resumed_after % SAVE_EVERY == 0 for kill in KILLS)


def test_the_killed_run_trains_the_lost_steps_again():
    lost = sum(kill.lost_steps for kill in KILLS)
    assert lost > 0
    total = f"steps: {STEPS}, plus {lost} replayed ({STEPS + lost} trained in total)"
    assert total in OUTPUT.splitlines()


def test_the_picture_shows_the_kills_of_the_transcript():
    picture = (TUTORIALS / "35_staircase.svg").read_text()
    drops = [int(steps) for steps in re.findall(r"<!-- −(\d+) -->", picture)]
    assert drops == [kill.lost_steps for kill in KILLS if kill.lost_steps]
    phases = [kill.phase for kill in KILLS]
    for phase in set(phases):
        assert f"<!-- killed {phase}: {phases.count(phase)} -->" in picture


def test_the_launcher_waits_30_seconds_by_default_and_longer_with_the_variable(monkeypatch):
    text, variable = " ".join(PAGE.split()), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    monkeypatch.delenv(variable, raising=False)
    assert f"waits up to {LaunchConfig(1, 1, 2).shutdown_timeout} seconds" in text
    [seconds] = re.findall(rf"`{variable}=(\d+)`", text)
    monkeypatch.setenv(variable, seconds)
    assert LaunchConfig(1, 1, 2).shutdown_timeout == int(seconds) > 30
    [flag] = re.findall(r"`torchrun (--shutdown-timeout \d+)`", text)
    options = get_args_parser().parse_args([*flag.split(), "train.py"])
    assert options.shutdown_timeout == int(seconds)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("tmux", "setsid"))), reason="needs tmux and setsid (util-linux)"
)
def test_a_closed_terminal_reaches_a_training_process_as_the_page_shows(start):
    ((command, shown),) = transcript("closed_terminal").items()
    result = start(command.split())
    assert result.returncode == 0, result.stderr
    # torchrun may get the signal twice, and then sends SIGTERM.
    reached, expected = (
        re.findall(
            r"^\| (`.*`) +\| (none|SIG\w+)", text.replace("SIGTERM ", "SIGHUP "), re.MULTILINE
        )
        for text in (result.stdout, shown)
    )
    assert reached == expected and len(expected) == 9


def test_the_page_names_the_files_of_the_manifest():
    assert f"`{MANIFEST}`" in PAGE and f"`{SEAL}`" in PAGE


WRAPPER = """
import os, runpy, signal, sys
from pathlib import Path
import torch

rename, step, count = Path.rename, torch.optim.AdamW.step, 0


def kill_first(folder, new):
    if new.name == "step-000015" and not Path(sys.argv[2], "killed").exists():
        Path(sys.argv[2], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(folder, new)


def counted(optimizer, *arguments, **options):
    global count
    count += 1
    if count == 12 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return step(optimizer, *arguments, **options)


if os.environ["EVENT"] == "kill":
    Path.rename = kill_first
if os.environ["EVENT"] == "signal":
    torch.optim.AdamW.step = counted
runpy.run_path("tutorials/35_recipe.py", run_name="__main__")
"""


@pytest.mark.pages
def test_the_recipe_ends_with_the_same_weights_after_a_kill_in_a_save_and_after_a_signal(
    start, tmp_path
):
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    (tmp_path / "kill").mkdir()

    def run(folder: str, event: str, processes: int = 2):
        command = f"torchrun --standalone --nproc-per-node {processes} --max-restarts 1".split()
        arguments = [tmp_path / "wrapper.py", "--run-dir", tmp_path / folder]
        new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        result = start([*command, *arguments], EVENT=event, OMP_NUM_THREADS="1", **new_store)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    [whole] = run("whole", "none")
    assert whole.startswith("2 processes, 36 steps: ")
    first, last = run("kill", "kill")
    assert first == "resumed after step 10" and last == whole
    kept = sorted(path.name for path in (tmp_path / "kill").glob("step-*"))
    assert kept == ["step-000030", "step-000035"]
    [stopped] = run("signal", "signal")
    step = int(stopped.removeprefix("stopped after step "))
    assert step in (12, 13)
    shutil.copytree(tmp_path / "signal", tmp_path / "one")
    assert run("signal", "none") == [f"resumed after step {step}", whole]
    # 3 epochs of 48 batches: a step uses 4 of them on two processes, and 2 on one.
    [resumed, ended] = run("one", "none", processes=1)
    assert resumed == f"resumed after step {step}"
    assert ended.startswith(f"1 processes, {step + (3 * 48 - 4 * step) // 2} steps: ")

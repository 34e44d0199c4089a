"""Page 35: what its transcript shows about kills, saves and lost steps."""

import re

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from accel_demo.run.manifest import MANIFEST, SEAL
from tests.pages.pages import TUTORIALS, transcript

PAGE = (TUTORIALS / "35_complete_or_absent.md").read_text()
((COMMAND, OUTPUT),) = transcript("crash").items()
LAUNCHES = [line for line in OUTPUT.splitlines() if line.startswith("launch ")]


def lost_steps() -> list[tuple[str, int]]:
    """Return when each kill came, such as "during a save", and the steps replayed because of it."""
    kills = [re.search(r"killed rank \d (.*)", line)[1] for line in LAUNCHES[:-1]]
    replayed = [re.search(r"\((\d+) steps? replayed\)", line) for line in LAUNCHES[1:]]
    steps = [int(match[1]) if match else 0 for match in replayed]
    return list(zip(kills, steps, strict=True))


def test_the_page_shows_the_command_that_recorded_its_transcript():
    assert COMMAND.split(" --plot ")[0] in PAGE.split("## See")[0]
    assert OUTPUT.splitlines()[0] in PAGE


def test_the_killed_run_ends_with_the_same_weights():
    assert "final weights: bitwise equal in all 20 tensors" in PAGE
    assert "damaged checkpoints used: 0" in PAGE
    assert "connected: 2 processes in 5 of 6 launches" in PAGE


def test_a_kill_during_a_save_costs_all_steps_since_the_last_checkpoint():
    assert "--checkpoint-every 3" in OUTPUT
    lost = lost_steps()
    assert [steps for kill, steps in lost if kill == "during a save"] == [3, 3]
    assert sorted(steps for kill, steps in lost if kill != "during a save") == [0, 1, 2]
    assert "cost 3 steps each, and the others 0, 1 and 2" in " ".join(PAGE.split())


def test_a_run_that_is_killed_while_it_saves_step_12_resumes_after_step_9():
    at = next(index for index, line in enumerate(LAUNCHES) if "reached step 12" in line)
    assert LAUNCHES[at].endswith("during a save") and at + 1 == 3
    assert "resumed after step 9" in LAUNCHES[at + 1]


def test_the_picture_shows_the_lost_steps_of_the_transcript():
    picture = (TUTORIALS / "35_staircase.svg").read_text()
    drops = [int(steps) for steps in re.findall(r"<!-- −(\d+) -->", picture)]
    assert drops == [steps for _, steps in lost_steps() if steps] == [1, 3, 3, 2]
    phases = [kill for kill, _ in lost_steps()]
    for phase in set(phases):
        assert f"<!-- killed {phase}: {phases.count(phase)} -->" in picture
    assert "(54 trained in total)" in OUTPUT
    assert "trains 54 steps to reach step 45" in " ".join(PAGE.split())


def test_the_launcher_waits_30_seconds_by_default_and_longer_with_the_variable(monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert LaunchConfig(1, 1, 2).shutdown_timeout == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    assert LaunchConfig(1, 1, 2).shutdown_timeout == 600
    text = " ".join(PAGE.split())
    assert "waits up to 30 seconds" in text and "`TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600`" in text
    assert "`torchrun --shutdown-timeout 600`" in text
    options = get_args_parser().parse_args(["--shutdown-timeout", "600", "train.py"])
    assert options.shutdown_timeout == 600


def test_the_page_names_the_files_of_the_manifest():
    text = " ".join(PAGE.split())
    assert f"The *manifest*, `{MANIFEST}`," in text and f"`{SEAL}` (`SEAL` in the code)" in text

"""Page 45: when a machine is lost."""

import re
from math import sqrt

import pytest

from tests.pages.pages import TUTORIALS, load_module, rows_below, transcript

PAGE = TUTORIALS / "45_lost_machine.md"
TEXT = " ".join(PAGE.read_text().split())
ROWS = rows_below(PAGE, "what happens")
UNDISTURBED, CABLE, ELASTIC_CABLE, SHORT_CUT, DEATH, RETURN = ROWS


def test_the_transcript_matches_its_command_and_is_on_the_page():
    [command] = load_module(TUTORIALS / "40_record.py").RECORDS["lost_machine"]
    [(recorded, output)] = transcript("lost_machine").items()
    assert recorded == command and set(output.splitlines()) <= set(PAGE.read_text().splitlines())
    assert [row[0] for row in ROWS] == list(load_module(TUTORIALS / "45_lost_machine.py").CASES)


def test_the_weights_are_equal_at_the_same_world_size():
    assert UNDISTURBED[1:] == ["–", "–", "–", "4", "–"]
    for row in ROWS[1:]:
        assert row[5] == {"4": "equal", "2": "differ"}[row[4]]
    assert [row[4] for row in ROWS] == ["4", "4", "2", "4", "2", "4"]


def test_each_run_continues_from_a_checkpoint_shortly_before_the_loss():
    for row in ROWS[1:]:
        assert row[3] in ("25", "30", "35")  # lost at step 33, and a save may be interrupted


def test_a_dead_process_is_noticed_sooner_than_a_broken_cable():
    noticed = [int(row[1].removesuffix(" s")) for row in ROWS[1:]]
    assert min(noticed[:3]) >= 10 > max(noticed[3:])


def test_each_side_blames_the_other():
    [output] = transcript("lost_machine").values()
    first, second = re.findall(r"^node (\d) \| error: (.*)$", output, re.MULTILINE)
    assert first[0] == "0" and first[1].startswith("ranks 2, 3 on node-1 have not answered")
    assert second[0] == "1" and second[1].startswith("the launcher on node-0 has died, or cannot")


def test_the_numbers_of_answer_2_are_right():
    hours = load_module(TUTORIALS / "45_failures.py").HOURS_PER_FAILURE_OF_ONE_GPU / 256
    assert f"3.09 · 64 = {hours:.0f} hours" in TEXT
    seconds = sqrt(2 * 20 * round(hours) * 3600)
    assert f"= {round(seconds, -1):,.0f} seconds: save every {seconds / 60:.0f} minutes" in TEXT


def test_an_elastic_launch_without_a_run_folder_is_refused(start):
    command = "torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint"
    no_wait = ["--rdzv-conf", "last_call_timeout=1"]  # for a second machine: 30 s by default
    command = [*command.split(), "localhost:0", *no_wait, "accel_demo/train.py"]
    ended = start(command, real=True)  # train.py reads the launcher's command line
    assert ended.returncode == 1
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "--run-dir" in line


@pytest.mark.parametrize("flag", ["--local-addr", "--rdzv-conf", "--rdzv-endpoint", "--nnodes"])
def test_the_flags_of_the_page_are_torchruns(flag):
    from torch.distributed.run import get_args_parser

    assert flag in TEXT and flag in get_args_parser().format_help()

"""Page 34: the answers to its short questions about the program."""

import re
from pathlib import Path

import pytest
import torch

from tests.pages.pages import TUTORIALS, load_module, rows_below

PROGRAM, PAGE = (TUTORIALS / f"34_kill_and_resume.{suffix}" for suffix in ("py", "md"))
FIELD = Path(__file__).parent / "field"
LEVELS = load_module(PROGRAM).LEVELS
SETTINGS = "SAVE_IN_EPOCH, SAVE_AFTER = 1, 5"
# Rows of the second table that are equal in one process with any settings.
ALWAYS_EQUAL = ["one backward pass before `load_state`", "`save_state` on the other ranks"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "changed", "row"),
    [
        (SETTINGS, "SAVE_IN_EPOCH, SAVE_AFTER = 1, 6", "saving only if `sync_gradients` is true"),
        ("Dropout(0.2)", "Dropout(0)", "a separate generator for the loader"),
    ],
)
def test_a_changed_program_makes_one_more_row_equal(text, changed, row, start, tmp_path):
    source = PROGRAM.read_text()
    assert source.count(text) == 1
    program = tmp_path / "changed.py"
    program.write_text(source.replace(text, changed))
    result = start(["python", program])
    assert result.returncode == 0, result.stderr
    second_table = result.stdout.split("removed from the last level")[1]
    equal = re.findall(
        r"^\| (.*?)(?: \(.*\))? \| .* \| \*\*equal\*\* \|$", second_table, re.MULTILINE
    )
    assert sorted(equal) == sorted([row, *ALWAYS_EQUAL])


def test_only_the_order_of_additions_in_ddp_leaves_a_difference_in_the_last_bits():
    text = PAGE.read_text()
    rows = re.findall(r"^\| (.*) \| \d+ of \d+ \| differ in the last bits \|$", text, re.MULTILINE)
    assert rows == [f"5 | {LEVELS['own generator']}", LEVELS["first backward"]]


def test_the_seven_points_cite_the_lines_of_the_recipe():
    lines = (TUTORIALS / "34_recipe.py").read_text().splitlines()
    points = re.findall(r"^(\d)\. .*? \(lines? ([\d\sand,]+)\)\.$", PAGE.read_text(), re.M | re.S)
    assert [number for number, _ in points] == list("1234567")
    for number, cited in points:
        marked = [n for n, line in enumerate(lines, 1) if f"# {number}" in line]
        assert marked == [int(line) for line in re.findall(r"\d+", cited)], number


@pytest.mark.parametrize("processes", [3])
def test_the_recipe_resumes_a_killed_run_to_the_same_bits(processes, start, tmp_path):
    command = f"torchrun --standalone --nproc-per-node {processes} tutorials/34_recipe.py"

    def run(folder: str, *options: str):
        return start([*command.split(), "--run-dir", tmp_path / folder, *options])

    whole = run("whole").stdout.splitlines()
    killed = run("killed", "--kill-after", "17")
    assert killed.returncode != 0 and killed.stdout == ""
    resumed = run("killed", "--resume").stdout.splitlines()
    assert resumed[0] == "resumed after step 15", "in the middle of an epoch"
    assert whole == resumed[1:] and whole[0].startswith(f"{processes} processes, 24 steps: ")


SAVE_AT_LEVEL_1 = """
import runpy, sys
from pathlib import Path
import torch
program = runpy.run_path(sys.argv[1])
_, _, saved_at = program["train"]({"weights", "recipe"}, Path(sys.argv[2]))
for path in Path(sys.argv[2]).glob("random_states_*.pkl"):
    print(saved_at, *torch.load(path, weights_only=False).items(), sep="\\n")
"""


def test_the_checkpoint_contains_the_count_of_micro_batches_but_not_the_epoch(start, tmp_path):
    result = start(["python", "-c", SAVE_AT_LEVEL_1, PROGRAM, tmp_path])
    lines = result.stdout.splitlines()
    assert lines[:2] == ["(1, 5)", "('step', 5)"], result.stderr
    assert "epoch" not in result.stdout


ORDER_AT_LEVEL_1 = """
import runpy, sys
from pathlib import Path
program = runpy.run_path(sys.argv[1])
level, checkpoint = {"weights", "recipe"}, Path(sys.argv[2])
samples, _, saved_at = program["train"](level, checkpoint)
resumed, _, _ = program["train"](level, checkpoint, saved_at)
equal = resumed[:7] == samples[5:12]
program["new_accelerator"](set()).end_training()
print(f"{saved_at}: as in the first epoch: {equal}\\n", end="", flush=True)
"""


def test_in_several_processes_no_file_contains_the_generator_of_the_order(start, tmp_path):
    """A new process creates the generator again, so its first epoch has the order of epoch 0."""
    program = tmp_path / "order.py"
    program.write_text(ORDER_AT_LEVEL_1)
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, program, PROGRAM, tmp_path / "c"]
    result = start(command)
    assert result.stdout == "(1, 5): as in the first epoch: True\n" * 2, result.stderr


def test_the_page_recommends_the_arguments_with_which_ranks_draw_different_numbers():
    rows = rows_below(PAGE, "arguments of `DataLoader`")
    same, different = "**the same**", "different"
    assert [tuple(row[1:]) for row in rows] == [
        (different, different),
        (same, same),
        (different, same),
        (different, different),
    ]
    change = PAGE.read_text().split("## The change")[1].split("## On GPUs")[0]
    for argument in rows[-1][0].strip("`").split(", "):
        assert f"`{argument}`" in change


def test_a_resumed_run_with_a_limit_loads_an_old_checkpoint_unless_it_sets_the_next_number(
    start, tmp_path
):
    result = start(["python", FIELD / "c08_checkpoint_numbers.py"], cwd=tmp_path)
    limited, unlimited = result.stdout.split("limit None")
    for printed in (limited, unlimited):
        assert "run 2 resumes with 2.0\n" in printed, result.stderr
        assert "run 3 resumes with 2.0 (the newest weights are 4)\n" in printed
    assert "run 2 save_state: ValueError" in unlimited and "ValueError" not in limited
    rows = rows_below(PAGE, "`total_limit`")
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("None", "0", "3"),
        ("2", "0", "3"),
        ("2", "3", "5"),
    ]


def test_only_a_loader_with_its_own_generator_leaves_the_dropout_masks_equal():
    masks_of = load_module(TUTORIALS / "34_masks.py").masks_of
    for own_generator, expected in ((False, [False] * 6), (True, [True] * 6)):
        full, resumed = masks_of(own_generator)
        assert len(full) == 12
        assert [torch.equal(*pair) for pair in zip(full[6:], resumed, strict=True)] == expected

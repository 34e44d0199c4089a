"""Page 12: the two conversions train, stop and resume like the plain script."""

import csv
import runpy
from pathlib import Path

import pytest
import torch

from tests.conftest import run_ranks
from tests.pages.pages import TUTORIALS, rows_below

PLAIN, ACCELERATE, DDP = (TUTORIALS / f"12_{name}.py" for name in ("plain", "accelerate", "ddp"))
SETTINGS = "LEARNING_RATE, CLIP_NORM, PATIENCE = 0.1, 1.0, 2"
FEWER_IMAGES = {
    "packaged_set(split)\n": "torch.utils.data.Subset(packaged_set(split), range(500))\n",
    "WARM_UP = 50": "WARM_UP = 3",
}
TRAINS = "        seed = 10_000 * options.seed + 100 * epoch"  # an epoch begins
both_conversions = pytest.mark.parametrize("program", [ACCELERATE, DDP], ids=lambda path: path.stem)


def changed(program: Path, folder: Path, changes: dict[str, str]) -> Path:
    """Write a copy of the program with other texts to a folder."""
    text = program.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / program.name
    copy.write_text(text)
    return copy


def train(program: Path, processes: int, epochs: int, folder: Path, *flags):
    words = [program, "--epochs", epochs, "--folder", folder, *flags]
    return run_ranks(words, processes, OMP_NUM_THREADS="1")


def files_of(folder: Path) -> tuple[dict, dict]:
    """Return the best weights, and the logit of each image, by its ID."""
    with open(folder / "best.csv", newline="") as file:
        return torch.load(folder / "best.pt"), dict(csv.reader(file))


def are_equal(folder: Path, other: Path) -> bool:
    (weights, logits), (other_weights, other_logits) = files_of(folder), files_of(other)
    same = [torch.equal(values, other_weights[name]) for name, values in weights.items()]
    return all(same) and weights.keys() == other_weights.keys() and logits == other_logits


def test_in_one_process_both_conversions_save_the_bits_of_the_plain_script(tmp_path):
    for program in (PLAIN, ACCELERATE, DDP):
        copy = changed(program, tmp_path, FEWER_IMAGES)
        result = train(copy, 1, 2, tmp_path / program.stem)
        assert result.returncode == 0, result.stderr
        assert "epoch 2: AUC 0." in result.stdout and "on 500 test images" in result.stdout
    for program in (ACCELERATE, DDP):
        assert are_equal(tmp_path / program.stem, tmp_path / PLAIN.stem)


def assert_the_saved_model_has_the_saved_logits(program: Path, folder: Path) -> None:
    """Fail if a rank has evaluated with running means of its own."""
    names, (weights, logits) = runpy.run_path(str(program)), files_of(folder)
    model = names["new_model"]().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = {
            each["id"]: model(each["image"][None]).item() for each in names["Shirts"]("test")
        }
    saved = {name: float(logit) for name, logit in logits.items()}
    assert saved == pytest.approx(expected, abs=1e-4)


@both_conversions
def test_two_processes_evaluate_each_image_once_and_resume_to_the_same_bits(program, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    copy = changed(program, tmp_path, FEWER_IMAGES)
    result = train(copy, 2, 3, whole)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("on 500 test images") == 3 and len(files_of(whole)[1]) == 500
    assert_the_saved_model_has_the_saved_logits(copy, whole)
    dies = f"        if epoch == 2:\n            import os; os.kill(os.getpid(), 9)\n{TRAINS}"
    result = train(changed(copy, tmp_path, {TRAINS: dies}), 2, 3, killed)
    assert result.stdout.count("on 500 test images") == 2
    result = train(changed(program, tmp_path, FEWER_IMAGES), 2, 3, killed, "--resume")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("on 500 test images") == 1
    assert are_equal(whole, killed)


@pytest.mark.parametrize(
    ("program", "processes"),
    [(PLAIN, 1), (ACCELERATE, 2), (DDP, 2)],
    ids=["plain", "accelerate", "ddp"],
)
def test_all_processes_stop_after_the_same_epoch_and_a_resumed_run_stops_at_once(
    program, processes, tmp_path
):
    no_gain = {**FEWER_IMAGES, SETTINGS: "LEARNING_RATE, CLIP_NORM, PATIENCE = 0.0, 1.0, 1"}
    copy = changed(program, tmp_path, no_gain)
    for flags, epochs in ([], 2), (["--resume"], 0):
        result = train(copy, processes, 5, tmp_path / "files", *flags)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("on 500 test images") == epochs
        assert result.stdout.count("stopped early") == 1


@pytest.mark.frameworks
def test_a_metric_of_torchmetrics_gathers_the_samples_of_all_ranks(tmp_path):
    pytest.importorskip("torchmetrics", reason="needs torchmetrics, which Lightning installs")
    program = tmp_path / "metric.py"
    program.write_text(TORCHMETRICS)
    result = run_ranks([program], 2)
    assert sorted(result.stdout.split()) == ["0.75", "0.75"], result.stderr


TORCHMETRICS = """
import torch, torch.distributed as dist
from torchmetrics.classification import BinaryAUROC

dist.init_process_group("gloo")
assert dist.get_world_size() == 2
metric = BinaryAUROC()
scores, targets = torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])
metric.update(scores[dist.get_rank() :: 2], targets[dist.get_rank() :: 2])
print(metric.compute().item(), flush=True)
dist.destroy_process_group()
"""


def test_the_comparison_finds_all_four_wrong_scripts_only_by_their_weights():
    page = TUTORIALS / "12_your_own_script.md"
    rows = rows_below(page, "program")
    assert [row[1] for row in rows] == list("111222222")
    assert [row[2] for row in rows] == ["", *["equal bits"] * 2, *["different"] * 6]
    found = [row[6] for row in rows[3:]]
    assert [float(row[4]) > float(row[5]) for row in rows[3:]] == [each == "yes" for each in found]
    assert found == ["no"] * 6
    differences = [row[2] for row in rows_below(page, "program, seed 1")]
    assert differences[:2] == ["below 1e-10"] * 2
    assert all(float(each) > 0.01 for each in differences[2:]) and len(differences) == 6


def test_the_audit_finds_what_the_page_says_it_finds_in_the_script_that_is_only_wrapped(
    start, tmp_path
):
    names = runpy.run_path(str(TUTORIALS / "12_compare.py"))
    folders = "    options.folder /= str(torch.distributed.get_rank())\n"
    wrapped = {old: new.replace(folders, "") for old, new in names["ONLY_WRAPPED"].items()}
    script = changed(PLAIN, tmp_path, wrapped | FEWER_IMAGES)
    command = ["torchrun", "--standalone", "--nproc-per-node", 2, script, "--epochs", 1]
    audit = start(["accel-demo", "audit", "--", *command, "--folder", tmp_path / "files"])
    assert audit.returncode == 1, audit.stderr
    assert "checked in 2 processes: connected processes" in audit.stdout
    for finding in (
        "all ranks draw the same random numbers from torch",  # 3
        "2 ranks write",  # 5
        'The names of the saved tensors begin with "module."',  # 6
        "2 backward passes of a step average the gradients",  # 8
    ):
        assert finding in audit.stdout, audit.stdout


def test_distance_prints_the_largest_difference_between_two_files(start, tmp_path):
    for name, value in (("one", 1.0), ("other", 1.25)):
        torch.save({"a": torch.zeros(3), "b": torch.tensor([value])}, tmp_path / name)
    command = ["python", TUTORIALS / "12_distance.py", tmp_path / "one", tmp_path / "other"]
    assert start(command).stdout == "0.25\n"

"""Page 12: the two conversions train, stop and resume like the plain script."""

import csv
import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.ops import StochasticDepth

from tests.conftest import run_ranks
from tests.pages.pages import TUTORIALS, rows_below

PLAIN, ACCELERATE, DDP = (TUTORIALS / f"12_{name}.py" for name in ("plain", "accelerate", "ddp"))
SETTINGS = "LEARNING_RATE, CLIP_NORM, PATIENCE = 0.1, 1.0, 2"
FEWER_IMAGES = {
    "packaged_set(split)\n": "torch.utils.data.Subset(packaged_set(split), range(500))\n",
    "WARM_UP = 50": "WARM_UP = 3",
}
TRAINS = "        seed = options.seed + 1_000 * epoch"  # an epoch begins
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


@pytest.mark.parametrize(("program", "total"), [(ACCELERATE, 1200), (DDP, 1000)])
def test_both_ranks_together_evaluate_as_many_images_as_the_page_says(program, total, tmp_path):
    received = "        for batch in loader:\n"
    few = "torch.utils.data.Subset(packaged_set(split), range(500 if split == 'train' else 1000))\n"
    changes = {received: received + "            print('images', len(batch['id']), flush=True)\n"}
    copy = changed(program, tmp_path, FEWER_IMAGES | changes | {"packaged_set(split)\n": few})
    result = train(copy, 2, 1, tmp_path / "files")
    assert "on 1000 test images" in result.stdout, result.stderr
    assert sum(map(int, re.findall(r"images (\d+)", result.stdout))) == total
    assert f"{total:,} " in (TUTORIALS / "12_your_own_script.md").read_text()


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


def test_the_exact_comparison_finds_five_wrong_scripts_and_five_seeds_find_one():
    page = TUTORIALS / "12_your_own_script.md"
    rows = rows_below(page, "program")
    assert [row[1] for row in rows] == list("111222222")
    assert [row[2] for row in rows] == ["", *["equal bits"] * 2, *["different"] * 6]
    means, deviations = zip(
        *(map(float, row[3].split(" ± ")) for row in rows if row[3]), strict=True
    )
    errors = [float(row[4]) for row in rows if row[4]]
    assert len(errors) == 6
    for number, error in enumerate(errors, 1):
        scale = ((deviations[0] ** 2 + deviations[number] ** 2) / 5) ** 0.5
        assert error == pytest.approx((means[number] - means[0]) / scale, abs=0.15)
        assert f"{2.3 * scale:.2f}" == "0.01"  # the smallest difference that the page calls a fault
    assert [abs(each) > 2.3 for each in errors] == [False] * 4 + [True, False]
    rows = rows_below(page, "program, 2 processes")
    assert [row[1] for row in rows] == ["right"] * 2 + ["wrong"] * 7
    [of_weights, of_metric] = [[row[column] == "below 1e-9" for row in rows] for column in (2, 3)]
    assert of_weights == [True] * 2 + [False] * 4 + [True] * 3, rows
    assert of_metric == [True] * 2 + [False] * 5 + [True] * 2, rows
    values = [value for row in rows for value in row[2:] if value != "below 1e-9"]
    assert all(float(each) > 1e-4 for each in values), rows


def test_exact_turns_off_batch_statistics_and_every_dropout():
    exact = runpy.run_path(str(TUTORIALS / "page_12_exact.py"))["exact"]
    attention = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True)
    attention.attention_dropout = 0.5  # a name that other libraries use
    norm = nn.BatchNorm1d(4, affine=False)  # used twice
    layers = nn.Conv1d(4, 4, 1), norm, attention, nn.Dropout(0.5), norm
    model = exact(nn.Sequential(*layers, nn.LSTM(8, 8, 2, dropout=0.5)))
    assert not any(isinstance(each, nn.BatchNorm1d) for each in model.modules())
    assert not model[1].affine and attention.attention_dropout == 0
    assert exact(nn.Sequential(StochasticDepth(0.5, "row")))[0].p == 0
    inputs = torch.rand(6, 4, 8)
    torch.testing.assert_close(model(inputs)[0][:3], model(inputs)[0][:3], rtol=0, atol=0)
    whole = model[:4](inputs)
    torch.testing.assert_close(whole[:3], model[:4](inputs[:3]))


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


def test_distance_prints_the_largest_difference_between_saved_weights(start, tmp_path):
    weights = {"a": torch.zeros(3), "b": torch.tensor([1.0])}
    torch.save(weights, tmp_path / "weights.pt")
    torch.save({"model": weights | {"b": torch.tensor([1.25])}}, tmp_path / "last.pt")
    (tmp_path / "last").mkdir()
    save_file(
        {"module.a": torch.zeros(3), "module.b": torch.tensor([float("nan")])},
        tmp_path / "last/model.safetensors",
    )
    for other, distance in (("last.pt", "0.25"), ("last", "nan")):
        command = ["python", TUTORIALS / "12_distance.py", tmp_path / "weights.pt"]
        assert start([*command, tmp_path / other]).stdout == f"{distance}\n"


def test_distance_names_weights_that_only_one_file_has_and_compares_the_others(start, tmp_path):
    """`save_state` writes weights that two layers share only once."""
    weights = {"head": torch.ones(2), "embedding": torch.ones(2)}
    torch.save(weights, tmp_path / "last.pt")
    (tmp_path / "last").mkdir()
    save_file({"embedding": torch.tensor([1.0, 1.5])}, tmp_path / "last/model.safetensors")
    files = [tmp_path / "last.pt", tmp_path / "last"]
    printed = start(["python", TUTORIALS / "12_distance.py", *files]).stdout
    assert printed == "only in one of them: head\n0.5\n"

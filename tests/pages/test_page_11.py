"""Page 11: a plain training loop, its DDP and Accelerate versions, and the weights they train."""

import ast
import inspect
import itertools
import json
import re
import runpy
import shlex
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader

from accel_demo.data import packaged_set
from tests.conftest import REPOSITORY, run_to_end
from tests.pages.pages import TUTORIALS, load_grader, table_rows

PAGE = "11_from_one_process_to_many.md"
TEXT = (TUTORIALS / PAGE).read_text()
TEXT_IN_ONE_LINE = " ".join(TEXT.split())
MOST_LINES_OF_CODE = 120  # before the full files

# Run a program. Before it disconnects, write the ranks that this process receives from the others.
RECORD_RANKS = """
import json, runpy, sys
from pathlib import Path
import torch.distributed as dist

folder, program = sys.argv[1:]
destroy = dist.destroy_process_group

def destroy_recorded(*arguments):
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(ranks))
    destroy(*arguments)

dist.destroy_process_group = destroy_recorded
runpy.run_path(program, run_name="__main__")
"""


def documented_launch(program: str) -> str:
    """Return the command in the program's docstring."""
    docstring = ast.get_docstring(ast.parse((REPOSITORY / program).read_text()))
    assert docstring is not None
    [command] = re.findall(r"(?:python|torchrun|accelerate) .*tutorials/11_\w+\.py", docstring)
    return command


def printed_values(text: str) -> list[float]:
    """Return the two losses and the accuracy that one run printed. Fail on any other output."""
    lines = "epoch 1: .* (.*)\nepoch 2: .* (.*)\ntest accuracy: (.*)\n"
    match = re.fullmatch(lines, text)
    assert match, text
    return [float(value) for value in match.groups()]


@cache
def launched(command: str) -> tuple[str, list[list[int]]]:
    """Run a command once. Return its output, and the ranks that each connected process received."""
    *launch, program = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Path(folder, "record_ranks.py")
        recorder.write_text(RECORD_RANKS)
        result = run_to_end([*launch, recorder, folder, program], timeout=90)
        assert result.returncode == 0, result.stderr
        return result.stdout, [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]


PLAIN, DDP, ACCELERATE = (
    documented_launch(f"tutorials/11_{name}.py") for name in ("plain", "ddp", "accelerate")
)


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        (PLAIN, 0),  # no launcher, and nothing to connect
        (DDP, 2),
        (ACCELERATE, 2),
        ("torchrun --standalone --nproc-per-node 3 tutorials/11_ddp.py", 3),
    ],
)
def test_a_launch_connects_its_processes_and_prints_each_line_once(command, processes):
    printed, records = launched(command)
    assert records == [list(range(processes))] * processes
    assert printed_values(printed)[2] > 0.75


def test_accelerate_in_one_process_trains_like_the_plain_program():
    assert launched("accelerate launch tutorials/11_accelerate.py")[0] == launched(PLAIN)[0]


def test_the_page_compares_the_weights_of_the_programs():
    rows = table_rows(PAGE, cells=5)
    assert [row[:4] for row in rows] == [
        ["1", "1", "`11_plain.py`", "`11_accelerate.py`"],
        ["2", "1", "`11_plain.py`", "`11_ddp.py`"],
        ["3", "2", "`11_ddp.py`", "`11_accelerate.py`"],
        ["4", "2", "`11_ddp.py`", "`11_accelerate.py`, seedable"],
    ]
    differences = [row[4] for row in rows]
    assert differences == ["0: equal bits", "above 0.01", "above 0.01", "below 1e-6: rounding"]


def test_a_difference_is_described_by_its_size():
    in_words = runpy.run_path(str(TUTORIALS / "11_compare.py"))["in_words"]
    differences = [in_words(size) for size in (0.0, 1e-7, 2e-4, 0.07, 3.0)]
    assert differences[:3] == ["0: equal bits", "below 1e-6: rounding", "2e-04"]
    assert differences[3:] == ["above 0.01", "above 0.01"]
    with pytest.raises(ValueError, match="nan"):
        in_words(float("nan"))


@pytest.mark.parametrize("results", [[[1.0]], [[1.0], [2.0]]])
def test_the_comparison_stops_if_a_process_is_missing_or_ends_with_different_weights(results):
    weights_of = runpy.run_path(str(TUTORIALS / "11_compare.py"))["weights_of"]
    weights_of.__globals__["spawn"] = lambda *_: [torch.tensor(weights) for weights in results]
    with pytest.raises(RuntimeError, match="ended with different weights"):
        weights_of("ddp", {}, 2)


def test_the_training_loop_is_the_same_under_ddp():
    loops = []
    for name in ("plain", "ddp"):
        text = (TUTORIALS / f"11_{name}.py").read_text()
        loop = text[text.index("        for images, labels in train_loader") :]
        loops.append(loop[: loop.index("optimizer.zero_grad()")].splitlines())
    assert loops[0] == loops[1]
    assert len(loops[0]) == 6


@pytest.mark.pages
@pytest.mark.parametrize(
    ("line", "changed"),
    [("sampler=sampler", "shuffle=True"), ("    dist.all_reduce(correct)\n", "")],
    ids=["no sampler", "no sum"],
)
def test_the_answers_to_questions_2_and_3(tmp_path, line, changed):
    text = (TUTORIALS / "11_ddp.py").read_text()
    assert text.count(line) == 1
    copy = tmp_path / "copy.py"
    copy.write_text(text.replace(line, changed))
    of_copy = launched(f"torchrun --standalone --nproc-per-node 2 {copy}")
    of_original = launched(PLAIN if changed else DDP)
    *losses, accuracy = printed_values(of_copy[0])
    *expected, right = printed_values(of_original[0])
    assert losses == expected
    assert accuracy / right == pytest.approx(1 if changed else 0.5, abs=0.05)


def test_the_code_before_the_full_files_is_short():
    before, *_ = re.split("^#+ .*full files.*$", TEXT, maxsplit=1, flags=re.MULTILINE)
    assert before != TEXT
    blocks = re.findall(r"^(`{3,})\w*\n(.*?)^\1$", before, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) > 10
    assert sum(len(block.splitlines()) for _, block in blocks) <= MOST_LINES_OF_CODE


def test_distributed_sampler_shuffles_with_its_own_seed_plus_the_epoch():
    def order(epoch: int, torch_seed: int = 0, **own_seed) -> list[int]:
        torch.manual_seed(torch_seed)
        sampler = torch.utils.data.DistributedSampler(range(50), 1, 0, **own_seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(3) == order(3, torch_seed=1) == order(0, seed=3) == order(1, seed=2) != order(0)


@pytest.mark.parametrize("is_seedable", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_prepared_loader_changes_the_order_of_each_epoch_without_set_epoch(
    is_seedable, processes
):
    """Only the seedable sampler counts the epochs, so only it repeats an epoch that was left."""
    loader = torch.utils.data.DataLoader(range(24), batch_size=4, shuffle=True)
    options = {"use_seedable_sampler": is_seedable, "data_seed": 0}
    loader = prepare_data_loader(loader, num_processes=processes, process_index=0, **options)
    synchronizes = loader.synchronized_generator is not None
    assert synchronizes == (processes == 2 and not is_seedable)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first != second
    third, fourth = (next(iter(loader)).tolist() for _ in range(2))
    assert (third == fourth) == is_seedable


def test_two_processes_share_the_test_images_evenly():
    count = len(packaged_set("test"))
    assert count % 2 == 0 and f"{count:,} test images evenly" in TEXT_IN_ONE_LINE


def test_the_picture_shows_the_first_step_of_the_ddp_program(start):
    result = start(["python", TUTORIALS / "11_replicas.py"])
    assert result.returncode == 0, result.stderr
    names = ("weight", "own", "average", "new")
    pattern = r"rank \d: " + ", ".join(f"{name} (.*)" for name in names)
    first, second = (re.fullmatch(pattern, line) for line in result.stdout.splitlines())
    assert first and second
    ranks = [dict(zip(names, map(float, each.groups()), strict=True)) for each in (first, second)]
    for rank in ranks:
        assert rank["weight"] == ranks[0]["weight"]
        assert rank["average"] == pytest.approx((ranks[0]["own"] + ranks[1]["own"]) / 2)
        assert rank["new"] == pytest.approx(rank["weight"] - 0.1 * rank["average"])
        for value in rank.values():
            assert f"{value:.3f}" in re.findall(r"!\[(.*)\]\(11_replicas.svg\)", TEXT)[0]
    code, ddp = ((TUTORIALS / f"11_{name}.py").read_text() for name in ("replicas", "ddp"))
    for line in ("model = nn.Sequential.*", "batch_size=64, sampler=", "torch.manual_seed.*"):
        assert re.findall(line, code) == re.findall(line, ddp) != []


def test_processes_of_accelerate_share_gpus_if_there_are_too_few():
    source = inspect.getsource(PartialState.set_device)
    assert "self.local_process_index % device_module.device_count()" in source


def test_the_ddp_program_needs_a_launcher(start):
    result = start(["python", TUTORIALS / "11_ddp.py"])
    assert result.returncode != 0
    message = "environment variable RANK expected, but not set"
    assert message in result.stderr and f"`{message}`" in TEXT_IN_ONE_LINE


def test_the_page_does_not_show_the_answer_to_its_exercise():
    assert "clip_grad_norm_" not in TEXT


def test_the_exercise_has_one_batch_that_needs_no_clipping_and_its_mistakes_change_the_weights():
    grader = load_grader("11")
    model, _ = grader.model_and_optimizer("cpu")
    norms = []
    for step in range(len(grader.SIZES)):
        by_rank = [grader.gradients_of(model, step, rank, "") for rank in range(2)]
        average = [sum(gradients) / 2 for gradients in zip(*by_rank, strict=True)]
        norms.append(torch.nn.utils.get_total_norm(average).item())
    assert [norm < grader.MAX_NORM / 2 for norm in norms] == [False, True, False, False]
    weights = {mistake: grader.reference(mistake, 0, 2) for mistake in ("", *grader.MISTAKES)}
    for (one, first), (other, second) in itertools.combinations(weights.items(), 2):
        difference = (first - second).abs().max()
        assert difference > 100 * grader.TOLERANCE, (one, other)

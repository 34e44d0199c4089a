"""Page 23: the measurements and the exercise on gradient accumulation."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from tests.conftest import run_ranks
from tests.exercises.wrong_answers import edited
from tests.pages.pages import (
    EXERCISES,
    FIELD,
    TUTORIALS,
    load_grader,
    load_module,
    mistake_in,
    rows_below,
    table_rows,
)

ANSWER = EXERCISES / "answers" / "23_accumulate.py"
CHANGED = [  # (text in our answer, replacement, part of the grader's message or "" if it is right)
    ("", "", ""),
    ("    for index", "    optimizer.zero_grad()\n    for index", ""),
    ("            (loss / length).backward()", "        (loss / length).backward()", ""),
    ("model(inputs)", "model(inputs, 1)", "your file raised an error: TypeError"),
    ("for index", "return\n    for index", "the optimizer steps 0 times instead of 3 times"),
    ("(inputs)", "(inputs + 1)", "the gradients do not match their windows: off by"),
    ("optimizer.step()", "optimizer.zero_grad(); optimizer.step()", "all gradients are zero when"),
    ("index - index % window", "0", "with 10 micro-batches and a window of 4, "),
]


def grade_all(answers: list[str]) -> list[str]:
    """Return the mistake in each answer, or "". Grade all answers in one process group."""
    return [mistake_in(load_grader("23"), answer, torch.device("cpu")) for answer in answers]


def test_the_grader_judges_what_the_loop_does(together, tmp_path):
    answers, right = [], ANSWER.read_text()
    for number, (text, changed, _) in enumerate(CHANGED):
        answers.append(tmp_path / f"answer {number}.py")
        answers[-1].write_text(edited(right, text, changed) if text else right)
    verdicts, others = together(grade_all, 2, answers=[str(answer) for answer in answers])
    assert verdicts == others
    for (*_, message), verdict in zip(CHANGED, verdicts, strict=True):
        assert message in verdict if message else verdict == ""


def test_the_page_shows_that_only_micro_batch_4_averages_gradients():
    assert rows_below(TUTORIALS / "23_accumulation.md", "micro-batch") == [
        *[[str(number), "0", "0", "0", "different on each rank"] for number in (1, 2, 3)],
        ["4", "0", "1", "1", "the same"],
    ]


def test_a_window_of_two_sends_in_micro_batches_2_and_4(start, tmp_path):
    program = (TUTORIALS / "23_accumulation.py").read_text()
    assert program.count("gradient_accumulation_steps=WINDOW") == 1
    changed = tmp_path / "window_of_two.py"
    changed.write_text(program.replace("steps=WINDOW", "steps=2"))
    config = "accelerate_configs/cpu_two_processes.yaml"
    result = start(["accelerate", "launch", "--config_file", config, changed])
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[2] for row in rows] == ["0", "1", "1", "2"]
    assert [row[4] for row in rows] == ["different on each rank |", "the same |"] * 2
    assert result.stdout.rstrip().endswith("have the same gradient: False")


@pytest.mark.parametrize(("models", "of_d"), [("one", 4), ("both", 2)])
def test_a_model_that_accumulate_does_not_know_sends_in_every_backward(models, of_d):
    result = run_ranks([FIELD / "c19_two_models.py", models], 2)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"buckets sent: {{'g': 2, 'd': {of_d}}} equal weights: [True, True]\n"


def gradients_with_two_models() -> dict[str, list[list[float]]]:
    """For each way of 23_two_models.py, return what each optimizer step of a and of b uses.

    Each micro-batch has the gradient 1 on rank 0 and 3 on rank 1, so 2 is right.
    """
    program, used = load_module(TUTORIALS / "23_two_models.py"), {}
    for name, train in program.WAYS.items():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=program.WINDOW)
        parts, used[name] = [program.Part(accelerator), program.Part(accelerator)], [[], []]
        for part, gradients in zip(parts, used[name], strict=True):
            torch.nn.init.ones_(part.model.module.weight)
            torch.nn.init.zeros_(part.model.module.bias)

            def note(optimizer, *_, gradients=gradients):
                gradients.append(optimizer.param_groups[0]["params"][1].grad.item())

            part.optimizer.optimizer.register_step_pre_hook(note)
            part.optimizer.optimizer.param_groups[0]["lr"] = 0.0
        inputs = torch.full((1, 8), (1 + 2 * dist.get_rank()) / 16)  # the gradient is 2 × the sum
        for _ in range(program.WINDOW):
            train(accelerator, *parts, inputs)
    return used


def test_two_models_step_once_with_the_right_gradient_only_in_one_accumulate(together):
    for used in together(gradients_with_two_models, 2):
        only_a, one_after_the_other, both = used.values()
        assert only_a == both == [[2.0], [2.0]]
        assert one_after_the_other == [[], [1.0, 1.0]]


def test_the_page_shows_the_all_reduces_and_steps_of_two_models():
    rows = rows_below(TUTORIALS / "23_accumulation.md", "one window of 4")
    assert [row[1:] for row in rows] == [
        ["1", "1", "4", "1"],
        ["0", "0", "2", "2"],
        ["1", "1", "1", "1"],
    ]


TOKENS = TUTORIALS / "23_tokens.py"


def test_the_page_shows_that_only_a_count_of_all_tokens_equals_one_batch():
    rows = rows_below(TUTORIALS / "23_accumulation.md", "connected processes")
    assert [row[0] for row in rows] == ["1", "2", "3"]
    lengths = load_module(TOKENS).LENGTHS
    for _, tokens, mean_of_each, mean_of_all in rows:
        counts = [int(count) for rank in tokens.split("; ") for count in rank.split(" + ")]
        assert sum(counts) == sum(lengths) and len(set(counts)) > 1
        assert mean_of_each.startswith("off by ") and mean_of_all == "equal within 1e-12"


def gradients_with_token_counts(own_count: bool) -> tuple[float, float]:
    """Return the distances of both gradients in 23_tokens.py from the gradient of one batch.

    If `own_count` is true, each rank divides by the number of its own tokens.
    """
    program = load_module(TOKENS)
    model = program.make_model()
    inputs, tokens = (torch.cat(part) for part in zip(*program.make_window(0, 1), strict=True))
    program.token_losses(model, inputs, tokens).mean().backward()
    right = parameters_to_vector(weight.grad for weight in model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        if own_count:
            patch.setattr(Accelerator, "reduce", lambda self, count: count * dist.get_world_size())
        connected, _, found = program.gradients(torch.device("cpu"))
    assert connected == dist.get_world_size()
    return tuple((gradient - right).norm().item() for gradient in found)


@pytest.mark.parametrize("processes", [2, 3])
def test_the_tokens_of_all_processes_have_to_be_counted(processes, together):
    for each, everything in together(gradients_with_token_counts, processes, own_count=False):
        assert each > 0.01 and everything < 1e-14
    for _, everything in together(gradients_with_token_counts, processes, own_count=True):
        assert everything > 0.01


LOOP = TUTORIALS / "23_loop.py"
CHANGES = {  # name: (text in 23_loop.py, replacement)
    "as it is": ("", ""),
    "without the factor": ("loss = loss * WINDOW / length", "pass"),
    "length in micro-batches": ("EPOCHS * windows", "EPOCHS * len(loader)"),
}


def weights_and_last_rates_of_loops(programs: dict[str, str]) -> dict[str, tuple]:
    results = {}
    for name, program in programs.items():
        _, model, scheduler = load_module(Path(program)).train()
        results[name] = parameters_to_vector(model.parameters()), scheduler.get_last_lr()[0]
    return results


def weights_with_large_batches(processes: int) -> torch.Tensor:
    """Train on one process, with one batch for each window of 23_loop.py on `processes` ones."""
    loop = load_module(LOOP)
    loader = DataLoader(loop.make_data(), loop.WINDOW * loop.BATCH * processes)
    assert len(loader.dataset) % loader.batch_size > 0  # the last window is short
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=loop.LEARNING_RATE)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=loop.EPOCHS * len(loader))
    for _ in range(loop.EPOCHS):
        for inputs, targets in loader:
            mse_loss(model(inputs), targets).backward()
            clip_grad_norm_(model.parameters(), loop.CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return parameters_to_vector(model.parameters())


@pytest.mark.parametrize(("processes", "unfinished"), [(1, 0.07), (2, 0.06)])
def test_the_loop_trains_as_with_large_batches_and_ends_its_schedule(
    together, tmp_path, processes, unfinished
):
    programs, right = {}, weights_with_large_batches(processes)
    for name, (text, changed) in CHANGES.items():
        programs[name] = str(tmp_path / f"{name}.py")
        program = LOOP.read_text()
        Path(programs[name]).write_text(edited(program, text, changed) if text else program)
    for results in together(weights_and_last_rates_of_loops, processes, programs=programs):
        equal = {name: torch.allclose(one, right, atol=1e-6) for name, (one, _) in results.items()}
        assert [name for name in equal if equal[name]] == ["as it is"]
        rates = [rate for _, rate in results.values()]
        assert rates == pytest.approx([0, 0, unfinished])


def test_the_page_shows_which_methods_are_correct():
    ways = [row[1:] for row in table_rows("23_accumulation.md", cells=7)]
    right = [row[1] for row in ways if row[-1] == "equal within 1e-6"]
    assert len(ways) == 14
    lanes = [row[0] for row in table_rows("23_accumulation.md", cells=7)]
    assert "".join(lanes) == "ABCBBBDBBBEEBB"
    assert right == [
        "one batch",
        "DDP, `no_sync` before the last",
        "DDP, without `no_sync`",
        "`accumulate`",
        "clip if `sync_gradients`",
        "loss × 4 / true length",
        "sum / tokens of all processes",
    ]
    assert [row[2:4] for row in ways if row[1] == "DDP, without `no_sync`"] == [["1", "4"]]

"""Page 31: when a learning rate schedule ends, and the exercise on equal learning curves."""

import re

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from tests.exercises.wrong_answers import edited
from tests.pages.pages import (
    EXERCISES,
    TUTORIALS,
    load_grader,
    mistake_in,
    table_rows,
)

PAGE = "31_batch_and_learning_rate.md"
EXERCISE, ANSWER = (EXERCISES / folder / "31_same_curve.py" for folder in (".", "answers"))
ONCE = ", step_scheduler_with_optimizer=False"
DIVIDED = "batch_size=global_batch // accelerator.num_processes"
BEFORE = ("    total_steps = len(loader)\n", "")
EARLIER = ("    model, loader = acc", "    total_steps = len(loader)\n    model, loader = acc")
SPLIT = (
    ONCE,
    ", dataloader_config=__import__('accelerate').DataLoaderConfiguration(split_batches=True)",
)
RIGHT = [  # edits to the model answer that keep it correct
    [SPLIT, (DIVIDED, "batch_size=global_batch")],
    [(ONCE, ""), BEFORE, EARLIER],
    [(ONCE, ""), ("prepare(optimizer, scheduler)", "prepare(optimizer), scheduler")],
    [(ONCE, ""), ("= len(loader)", "= len(loader) * accelerator.num_processes")],
    [(ONCE, ""), ("    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)\n", "")],
    [
        ("LambdaLR(", "torch.optim.lr_scheduler.LinearLR("),
        ("lambda step: max(0.0, 1 - step / total_steps)", "1.0, 0.0, total_steps"),
    ],
    [
        SPLIT,
        (DIVIDED, "batch_size=global_batch"),
        ("prepare(optimizer, scheduler)", "prepare(optimizer), scheduler"),
    ],
    [
        ("    for inputs, targets in", "    for step, (inputs, targets) in"),
        (" in loader:\n", " in enumerate(loader):\n"),
        (
            "        optimizer.step()\n        scheduler.step()\n",
            "        for group in optimizer.param_groups:\n"
            "            group['lr'] = learning_rate * (1 - step / total_steps)\n"
            "        optimizer.step()\n",
        ),
    ],
    [
        (
            DIVIDED,
            f"{DIVIDED}, sampler=torch.utils.data.DistributedSampler(train_set, shuffle=False)",
        ),
        (
            "model, loader = accelerator.prepare(model, loader)",
            "model = accelerator.prepare(model)",
        ),
    ],
]
MORE = (DIVIDED, "batch_size=global_batch")
FASTER = ("lr=learning_rate", "lr=learning_rate * accelerator.num_processes")
WRONG = [  # (edits to the model answer, part of the grader's message)
    ([MORE, FASTER], "whole global batch. Also wrong: the first learning rate"),
    ([MORE, (ONCE, "")], "whole global batch. Also wrong: the schedule"),
    ([FASTER, (ONCE, "")], "as on one process. Also wrong: the schedule"),
    ([MORE, FASTER, BEFORE, EARLIER], "Also wrong: the first learning rate and the schedule"),
    ([(DIVIDED, "batch_size=8")], "a step uses 16 samples instead of 12"),
    ([("        scheduler.step()\n", "")], "the learning rate never changes"),
    ([("        optimizer.zero_grad()\n", "")], "but the weights are off by"),
    (
        [
            (
                "model, loader = accelerator.prepare(model, loader)",
                "loader = accelerator.prepare(loader)",
            )
        ],
        "the processes end with different weights",
    ),
    ([("        optimizer.step()\n", "")], "the optimizer never steps"),
    ([(DIVIDED, "batch_size=4")], "a step uses 8 samples instead of 16"),
    (
        [("1 - step / total_steps", "1 / (1 + step)")],
        "the learning rates of the steps are 0.1 0.05",
    ),
    ([("model(inputs)", "model(inputs, 1)")], "your file raised an error: TypeError"),
    ([("        loss = mse", "        break\n        loss = mse")], "the optimizer never steps"),
]


def measurements(answers: list[str]) -> dict:
    """Return what this rank measures. All of it takes place in one process group.

    "mistakes" contains the mistake in each answer, or "".
    """
    grader, device = load_grader("31"), torch.device("cpu")
    return {
        "mistakes": [mistake_in(grader, answer, device) for answer in answers],
        "last rate": last_rate_with_accumulation(),
        "one cycle": rates_of_a_short_one_cycle_schedule(),
        "plateau": rates_of_a_plateau_scheduler_stepped_once(),
        "advances": [lengths_and_advances_of_an_epoch(samples) for samples in (6, 5)],
        "weights": shuffled_weights(),
    }


def shuffled_weights() -> list[torch.Tensor]:
    return [weights_after_a_shuffled_epoch(is_seedable) for is_seedable in (True, False)]


def last_rate_with_accumulation() -> float:
    """Accumulate over 4 batches, and return the last learning rate of the prepared schedule.

    The schedule decreases from 1 to 0 in 16 steps: the unprepared loader has 16 batches.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, loader = torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.zeros(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 16)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return scheduler.get_last_lr()[0]


def weights_after_a_shuffled_epoch(is_seedable: bool) -> torch.Tensor:
    """Train with a global batch of 8 and a shuffled loader. Return the weights."""
    options = {"use_seedable_sampler": True, "data_seed": 0} if is_seedable else {}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(0)
    samples = torch.randn(64, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples, 8 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_a_divided_batch_gives_the_same_weights_only_with_a_seedable_sampler(together, ranks):
    [[seedable, other]] = together(shuffled_weights, 1)
    seedable_on_two, other_on_two = ranks[0]["weights"]
    assert torch.allclose(seedable, seedable_on_two, atol=1e-6)
    assert not torch.allclose(other, other_on_two, atol=1e-6)


def lengths_and_advances_of_an_epoch(samples: int) -> tuple[int, int, int]:
    """Return `len(loader)` before and after `prepare`, and how often the scheduler advances."""
    accelerator, loader = Accelerator(cpu=True), DataLoader(torch.zeros(samples, 1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: step)
    before = len(loader)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    for _ in loader:
        optimizer.step()
        scheduler.step()
    return before, len(loader), int(scheduler.get_last_lr()[0])


def test_by_default_a_scheduler_advances_n_times_the_length_after_prepare(ranks):
    assert [rank["advances"] for rank in ranks] == [[(6, 3, 6), (5, 3, 6)]] * 2


def rates_of_a_short_one_cycle_schedule() -> list[float]:
    """Return the learning rates of 32 optimizer steps with a prepared schedule of 32 steps."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=32)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    rates = []
    for _ in range(32):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


def rates_of_a_plateau_scheduler_stepped_once() -> list[float]:
    """Return the learning rates of four epochs without improvement, prepared as `train.py` does."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = accelerator.prepare(ReduceLROnPlateau(optimizer, factor=0.1, patience=1))
    rates = []
    for _ in range(4):
        scheduler.step(1.0)
        rates += scheduler.get_last_lr()
    return rates


@pytest.fixture(scope="module")
def ranks(together, tmp_path_factory):
    """Call `measurements` on two ranks, and return each rank's result.

    The answers are the unsolved file, the model answer, and the model answer with each of the
    edits in `RIGHT` and `WRONG`.
    """
    folder = tmp_path_factory.mktemp("answers")
    answers = [EXERCISE, ANSWER]
    for number, changes in enumerate([*RIGHT, *(changes for changes, _ in WRONG)]):
        text = ANSWER.read_text()
        for old, new in changes:
            text = edited(text, old, new)
        answers.append(folder / f"answer {number}.py")
        answers[-1].write_text(text)
    return together(measurements, 2, answers=[str(answer) for answer in answers])


def test_with_accumulation_over_four_batches_only_a_quarter_of_the_schedule_is_done(ranks):
    assert [rank["last rate"] for rank in ranks] == [0.75, 0.75]


def test_a_plateau_scheduler_prepared_with_the_argument_counts_each_epoch_once(ranks):
    for rank in ranks:
        assert rank["plateau"] == pytest.approx([1, 1, 0.1, 0.1])


def test_a_prepared_one_cycle_schedule_that_is_too_short_stays_one_step_past_its_end(ranks):
    for rates in (rank["one cycle"] for rank in ranks):
        assert len(set(rates[:15])) == 15 and len(set(rates[15:])) == 1
        assert 1e-5 < rates[-1] < 0.005  # it has risen a little: the schedule ends at 4e-6


def test_the_grader_passes_correct_answers_and_distinguishes_typical_mistakes(ranks):
    not_done, *mine = ranks[0]["mistakes"]
    assert [not_done, *mine] == ranks[1]["mistakes"]
    assert not_done.startswith("a step uses 32 samples instead of 16")
    assert not_done.endswith("Also wrong: the first learning rate and the schedule")
    rights = 1 + len(RIGHT)
    assert mine[:rights] == [""] * rights
    for (_, said), verdict in zip(WRONG, mine[rights:], strict=True):
        assert said in verdict


def test_on_two_processes_only_two_of_four_schedules_end_with_the_epoch():
    ways = table_rows(PAGE, cells=8)
    right = ["1", "0.75", "0.5", "0.25", "0", "64"]
    assert [way[2:] for way in ways[:4]] == [right] * 4  # on one process
    assert ways[4:] == [
        ["before `prepare`", "once per process (default)", *right],
        ["after `prepare`", "once per process (default)", "1", "0.5", "0", "0", "0", "32"],
        ["before `prepare`", "once", "1", "0.875", "0.75", "0.625", "0.5", "–"],
        ["after `prepare`", "once", *right],
    ]
    text = (TUTORIALS / PAGE).read_text()
    assert text.index("Connected processes: 1") < text.index("Connected processes: 2")


def test_on_two_processes_a_prepared_plateau_scheduler_lowers_the_rate_in_every_epoch():
    assert [row for row in table_rows(PAGE, cells=5) if row[0].endswith("prepared")] == [
        ["prepared", "1", "1", "0.1", "0.1"],
        ["not prepared", "1", "1", "0.1", "0.1"],
        ["prepared", "1", "0.1", "0.01", "0.001"],
        ["not prepared", "1", "1", "0.1", "0.1"],
    ]


def test_the_recorded_curves_support_the_claims_of_the_page():
    rows = {row[0]: row[1:] for row in table_rows(PAGE, cells=9)}
    assert len(rows) == 8
    one = next(iter(rows.values()))  # the run on one process
    for name in ("right", "right, by split_batches"):
        assert rows[name][1:] == one[1:]  # all cells except the number of processes
    assert int(rows["scheduler stepped ×N"][4]) * 2 == int(one[4])
    ends = ["", ", learning rate ×√N", ", learning rate ×N"]
    none, root, linear = (with_interval(rows[f"global batch ×N{end}"][6]) for end in ends)
    assert none[0] > root[0] > linear[0] > 0 == with_interval(one[6])[0]
    by_default = with_interval(rows["global batch ×N, by default"][6])
    assert linear[2] < min(none[1], root[1], by_default[1]), "the intervals do not overlap"


def with_interval(cell: str) -> list[float]:
    """Convert "0.50 (0.41 – 0.60)" to [0.5, 0.41, 0.6]."""
    return [float(number) for number in re.findall(r"[\d.]+", cell)]


def test_the_answer_quotes_the_recorded_losses_at_a_high_learning_rate():
    lines = (TUTORIALS / "transcripts" / "lr_high.txt").read_text().splitlines()
    assert lines[0] == "$ accel-demo lr --learning-rate 0.05"
    rows = {
        line.split("|")[1].strip(): line.split("|")[-3].strip() for line in lines if "|" in line
    }
    ends = ["", ", learning rate ×√N", ", learning rate ×N"]
    cells = [rows[f"global batch ×N{end}"] for end in ends]
    answer = " ".join((TUTORIALS / PAGE).read_text().split("<summary>Answer 2")[1].split())
    assert "were {}, {} and {}.".format(*cells) in answer
    intervals = [with_interval(cell)[1:] for cell in cells]
    assert max(low for low, _ in intervals) < min(high for _, high in intervals), "they overlap"

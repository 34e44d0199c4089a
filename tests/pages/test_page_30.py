"""Page 30: the samples that each rank reads, and the exercise on exact accuracy."""

import warnings
from itertools import chain
from pathlib import Path

import grading
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.conftest import run_ranks
from tests.exercises.wrong_answers import edited
from tests.pages.pages import EXERCISES, FIELD, TUTORIALS, load_grader, table_rows

PAGE = "30_who_saw_which_sample.md"
ANSWER = EXERCISES / "answers" / "30_exact_accuracy.py"
GATHER = "accelerator.gather_for_metrics("
PADDED = "accelerator.gather("
START = "    right = counted = 0\n"
LINE = f"        predictions, labels = {GATHER}(predictions, labels))\n"
COUNT = "        right += (predictions == labels).sum().item()\n        counted += len(labels)\n"
MEAN = "        right += (predictions == labels).float().mean().item()\n        counted += 1\n"
LOADER = "DataLoader(dataset, batch_size))\n"
UNEVEN = (LOADER, f"{LOADER}    loader.batch_sampler.even_batches = False\n")
OWN_MEAN = """import torch
    own = torch.tensor(right / max(counted, 1))
    return accelerator.reduce(own, "mean").item()"""
PREPARED = "accelerator.prepare(DataLoader(dataset, batch_size))"
RESULT = "return right / counted"
WRONG = [  # (text in the model answer, replacement, …, part of the grader's message)
    (*UNEVEN, LINE, "", RESULT, OWN_MEAN, "It is a mean of the ranks' accuracies"),
    (*UNEVEN, LINE, "", COUNT, MEAN, RESULT, OWN_MEAN, "a mean over ranks of means over batches"),
    (RESULT, "return right / 30", "Only the divisor is wrong: it is 30, because 8 samples"),
    (
        GATHER,
        PADDED,
        RESULT,
        "return right / len(dataset)",
        "predictions are counted over 30 samples",
    ),
    (RESULT, "return right / 22", "for 30 samples, it returns 1.2273 instead of 0.9"),
    (RESULT, "print()", "rank 0 returns None instead of a number"),
    (RESULT, f"{RESULT} + accelerator.process_index", "different numbers (0.8182, 1.8182, 2.8182)"),
    (RESULT, f"{RESULT} - 0.5", "for 22 samples, it returns 0.3182 instead of 0.8182"),
    ("model(inputs)", "model(inputs, 1)", "accuracy raises TypeError"),
    (START, "    raise SystemExit(0)\n", "accuracy raises SystemExit: 0"),
]
# Right answers that differ from the model answer.
OWN_LOADER = """import torch
    own = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    loader = DataLoader(torch.utils.data.Subset(dataset, own), 1)"""
SHARED = """import torch
    counts = accelerator.reduce(torch.tensor([right, counted]), "sum")
    return counts[0] / counts[1]"""
RIGHT = [  # (text in the model answer, replacement, …)
    (*UNEVEN, LINE, "", RESULT, SHARED),
    (f"loader = {PREPARED}", OWN_LOADER, LINE, "", RESULT, SHARED),
    ("batch_size))", "batch_size, shuffle=True))"),
]


def measurements(answers: list[str]) -> dict:
    """Return what this rank measures. All of it takes place in one process group."""
    observe, device = load_grader("30").observe, torch.device("cpu")
    return {
        "gathered in the loop": samples_gathered_for_metrics(in_the_loop=True),
        "gathered after the loop": samples_gathered_for_metrics(in_the_loop=False),
        "unfinished epochs, seedable": first_batches_of_unfinished_epochs(seedable=True),
        "unfinished epochs": first_batches_of_unfinished_epochs(seedable=False),
        "only the loader drops": samples_of_distributed_sampler(sampler_drops=False),
        "the sampler drops": samples_of_distributed_sampler(sampler_drops=True),
        "Accelerate drops": samples_read_with_drop_last(),
        "join_uneven_inputs warns": warnings_of_join_uneven_inputs(),
        "weights after uneven epochs": differences_after_uneven_epochs(),
        "reports": [grading.fill_in({}, observe, Path(answer), device) for answer in answers],
    }


@pytest.fixture(scope="module")
def ranks(together, tmp_path_factory):
    """Call `measurements` on three ranks, and return each rank's result.

    The answers are the unsolved file, each wrong answer and each right one.
    """
    folder, model_answer = tmp_path_factory.mktemp("answers"), ANSWER.read_text()
    answers = [EXERCISES / "30_exact_accuracy.py"]
    for number, changes in enumerate([*(changes for *changes, _ in WRONG), *RIGHT]):
        text = model_answer
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            text = edited(text, old, new)
        answers.append(folder / f"answer_{number}.py")
        answers[-1].write_text(text)
    return together(measurements, 3, timeout=220, answers=[str(answer) for answer in answers])


@pytest.fixture
def reports(ranks):
    """For the unsolved file, each wrong and each right answer, return a report per rank."""
    return [list(of_all) for of_all in zip(*(rank["reports"] for rank in ranks), strict=True)]


def samples_gathered_for_metrics(in_the_loop: bool) -> int:
    """Return how many of 22 samples `gather_for_metrics` returns per batch or after the loop."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(22), 5))
    if in_the_loop:
        return sum(len(accelerator.gather_for_metrics(samples)) for samples in loader)
    return len(accelerator.gather_for_metrics(torch.cat(list(loader))))


def test_after_the_loop_gather_for_metrics_does_not_remove_padding(ranks):
    assert [rank["gathered in the loop"] for rank in ranks] == [22] * 3
    assert [rank["gathered after the loop"] for rank in ranks] == [30] * 3


def test_a_mean_per_rank_contains_the_padding():
    result = run_ranks([FIELD / "c07_scalar_gather.py"], 2)
    assert result.returncode == 0, result.stderr
    per_sample, scalars = result.stdout.splitlines()
    assert per_sample == "true mean 4.0 per-sample 4.0"
    _, mean, shape = scalars.split(" ", 2)
    assert float(mean) == pytest.approx((2 + 26 / 5) / 2)  # 3.6: rank 1 read sample 0 again
    assert shape == "[(2,)]"  # two connected ranks


def first_batches_of_unfinished_epochs(seedable: bool) -> list[list[int]]:
    """Return the first batches of four epochs that end there. `set_epoch` starts the fourth."""
    options = {"use_seedable_sampler": True, "data_seed": 0} if seedable else {}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(range(22), 5, shuffle=True))
    batches = [next(iter(loader)).tolist() for _ in range(3)]
    loader.set_epoch(1)
    return [*batches, next(iter(loader)).tolist()]


def test_only_the_seedable_sampler_repeats_the_order_after_an_unfinished_epoch(ranks):
    for rank in ranks:
        *batches, of_epoch_1 = rank["unfinished epochs, seedable"]
        assert batches == 3 * batches[:1]
        assert of_epoch_1 != batches[0]
        *batches, _ = rank["unfinished epochs"]
        assert batches[0] != batches[1] != batches[2] != batches[0]


def samples_of_distributed_sampler(sampler_drops: bool) -> list[int]:
    sampler = DistributedSampler(range(22), drop_last=sampler_drops)
    loader = DataLoader(range(22), 4, sampler=sampler, drop_last=True)
    return torch.cat(list(loader)).tolist()


def samples_read_with_drop_last() -> list[int]:
    loader = Accelerator(cpu=True).prepare(DataLoader(range(22), 5, drop_last=True))
    return torch.cat(list(loader)).tolist()


def test_drop_last_in_the_loader_alone_does_not_stop_distributed_sampler_from_padding(ranks):
    padded = [*chain(*(rank["only the loader drops"] for rank in ranks))]
    assert (len(padded), len(set(padded))) == (24, 22)
    dropped = [*chain(*(rank["the sampler drops"] for rank in ranks))]
    assert (len(dropped), len(set(dropped))) == (12, 12)


def mistake_of_group(by_rank: list[dict]) -> str:
    named = {f"3-{rank}": report for rank, report in enumerate(by_rank)}
    try:
        grading.check(grading.Outcome(0, "", named, 0), (3,), load_grader("30").judge)
    except grading.Wrong as mistake:
        return str(mistake)
    return ""


def test_the_unsolved_file_behaves_as_its_docstring_describes(reports):
    for report in reports[0]:
        for_22, for_30 = (seen["result"] for seen in report["seen"])  # the third case fails
        assert abs(for_22 - 18 / 22) > 0.01 and abs(for_30 - 27 / 30) < 1e-6
        assert "RuntimeError" in report["mistake"]


def test_the_grader_distinguishes_typical_mistakes(reports):
    for (*_, message), by_rank in zip(WRONG, reports[1:], strict=False):
        assert message in mistake_of_group(by_rank)


def test_the_grader_accepts_other_ways_to_count(reports):
    assert [mistake_of_group(by_rank) for by_rank in reports[-len(RIGHT) :]] == [""] * len(RIGHT)


def test_the_page_shows_how_many_samples_each_method_counts():
    ways = {row[1]: row[2:] for row in table_rows(PAGE, cells=6)}
    assert ways["`gather`"] == ["30", "22", "76.7%", "no"]
    assert ways["`gather_for_metrics`, loader prepared"] == ["22", "22", "81.8%", "yes"]
    assert ways["one process, one sum"] == ["22", "22", "81.8%", "yes"]
    exact = [way for way, cells in ways.items() if cells[0] == "22" and cells[3] == "yes"]
    assert exact == ["one process, one sum", "`gather_for_metrics`, loader prepared"]
    assert ways["`DistributedSampler` and prepared"][:2] == ["7", "7"]
    assert ways["`gather_for_metrics`, each rank's accuracy"] == ways["`gather`"]
    assert len(ways) == 9


def test_the_page_shows_padding_and_an_order_that_repeats_without_set_epoch():
    rows = table_rows(PAGE, cells=7)  # rows of both loaders, then DistributedSampler's without it
    assert [row[3:5] for row in rows[:9]] == [["2", "0"]] * 3 + [["8", "0"]] * 3 + [["2", "0"]] * 3
    assert [row[6] for row in rows[:6]] == 2 * ["–", "no", "no"]
    assert [row[6] for row in rows[6:9]] == ["–", "yes", "yes"]
    assert [row[2:] for row in table_rows(PAGE, cells=4)][:2] == [
        ["24 (22 different)", "24 (22 different)"],
        ["30 (22 different)", "22 (22 different)"],
    ]


def test_the_page_names_the_rank_that_would_wait():
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    assert (
        "rank 0 has more batches (2) than rank 2 (1). In training the all-reduce of batch 2" in text
    )
    assert text.count("Samples that a metric counts") == 2  # not if the ranks' batches are uneven


def test_with_drop_last_accelerate_leaves_out_7_of_22_samples(ranks):
    read = [*chain(*(rank["Accelerate drops"] for rank in ranks))]
    assert len(read) == len(set(read)) == 22 - 7
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    assert f"here {22 - len(read)} of the 22." in text


def differences_after_uneven_epochs() -> dict[str, list[float]]:
    """Train in `Join`; rank 0 has one batch more. Compare the weights with those of rank 0.

    Return the largest difference for plain SGD and with momentum, after the epoch and one step
    later.
    """
    found = {}
    for momentum in (0.0, 0.9):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        torch.manual_seed(1 + dist.get_rank())

        def step(model=model, optimizer=optimizer):
            model(torch.randn(3, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        differences = found[f"momentum {momentum}"] = []
        with Join([model]):
            for _ in range(2 if dist.get_rank() == 0 else 1):
                step()
        for _ in range(2):
            own = model.module.weight.detach()
            first = own.clone()
            dist.broadcast(first, 0)
            differences.append((own - first).abs().max().item())
            step()
    return found


def test_after_an_uneven_epoch_in_join_the_weights_drift_apart_with_momentum(ranks):
    for rank in ranks[1:]:
        measured = rank["weights after uneven epochs"]
        assert measured["momentum 0.0"] == [0, 0]
        after_the_epoch, a_step_later = measured["momentum 0.9"]
        assert after_the_epoch == 0 < a_step_later


def test_join_uneven_inputs_only_warns_on_a_cpu(ranks):
    for rank in ranks:
        [warning] = rank["join_uneven_inputs warns"]
        assert warning.endswith("`join_uneven_inputs` will have no effect.")


def warnings_of_join_uneven_inputs() -> list[str]:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
    return [str(warning.message) for warning in caught]

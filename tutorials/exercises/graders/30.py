"""Grade exercise 30: evaluate on three processes, and record which samples each model receives."""

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from grading import STUCK, Wrong, dist, grade, import_answer, naming_errors, torch

PROCESSES, BATCH = 3, 5
# (number of samples, samples that the model misclassifies). A round of one batch per process has 15
# samples: 22 samples fill one round and part of another, 30 fill two rounds, and 4 fill no batch.
CASES = [(22, [1, 2, 6, 20]), (30, [3, 4, 27]), (4, [2])]
RIGHT = f"the exact accuracy of 22, 30 and 4 samples, on each of {PROCESSES} ranks"
TOLERANCE = 1e-6
PADDING = "Why gather returns more predictions than samples"  # headings of the page
SPLITTING = "Why the loader must be prepared exactly once"
MEANS = "Why a mean of accuracies is not the accuracy"
NO_PADDING = "Why turning padding off can hang training"
COMMON = "Common mistakes"


def observe(answer: Path, device) -> Iterator[dict]:
    """For each case, yield the answer's result and the batches that the model received.

    Also yield whether the answer called `accelerator.gather_for_metrics`.
    """
    from accelerate import Accelerator
    from accelerate.state import GradientState

    from accel_demo.processes.devices import use_cpu

    class Model(torch.nn.Module):
        """A classifier that is wrong only for the samples in `mistakes`."""

        def __init__(self, mistakes: list[int]):
            super().__init__()
            self.mistakes, self.batches = mistakes, []
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, inputs):
            samples = inputs[:, 0].round().int().tolist()
            self.batches.append(samples)
            labels = [(sample + (sample in self.mistakes)) % 3 for sample in samples]
            return torch.nn.functional.one_hot(torch.tensor(labels), 3).to(inputs) * self.scale

    accuracy = import_answer(answer).accuracy
    for samples, mistakes in CASES:
        # As in real processes, the seeds differ, so ranks that shuffle by themselves do not agree.
        torch.manual_seed(dist.get_rank())
        random.seed(dist.get_rank())
        GradientState._reset_state()  # in case the last call did not read its loader to the end
        accelerator, model = Accelerator(cpu=use_cpu()), Model(mistakes)
        model.to(accelerator.device)
        gather_for_metrics = mock.Mock(wraps=accelerator.gather_for_metrics)
        accelerator.gather_for_metrics = gather_for_metrics
        inputs = torch.stack([torch.arange(samples), torch.ones(samples)], dim=1)
        dataset = torch.utils.data.TensorDataset(inputs, torch.arange(samples) % 3)
        where = f"on rank {dist.get_rank()}, for {samples} samples"
        with torch.no_grad(), naming_errors(f"{where}, accuracy raises"):
            result = accuracy(accelerator, model, dataset, BATCH)
        try:
            result = float(result)
        except (TypeError, ValueError, RuntimeError):
            result = repr(result)[:80]
        yield {"result": result, "batches": model.batches, "for_metrics": gather_for_metrics.called}


def judge(number: int, seen: list[dict]) -> None:
    batches_by_rank = [observation["batches"] for observation in seen]
    judge_reading(batches_by_rank, CASES[number][0])
    results = [observation["result"] for observation in seen]
    for_metrics = any(observation["for_metrics"] for observation in seen)
    judge_results(results, batches_by_rank, *CASES[number], for_metrics)


def judge_reading(batches_by_rank: list[list[list[int]]], samples: int) -> None:
    read = [sum(batches, []) for batches in batches_by_rank]  # sample numbers, by rank
    share = math.ceil(samples / (PROCESSES * BATCH)) * BATCH  # samples per rank, including padding
    most = max(map(len, read))
    if most > share and sum(map(bool, read)) == 1:
        through = f"{most} samples go through the model on it, and none on the others"
        raise Wrong(f"one rank does all the work: {through}", SPLITTING)
    if most > share:
        raise Wrong(
            f"the work is not shared: of {samples} samples, {most} go through the model on one "
            f"rank, but {share} are enough. Does every rank read the whole dataset?",
            SPLITTING,
        )
    if missing := sorted(set(range(samples)) - set(sum(read, []))):
        lost = (
            f"{len(missing)} of {samples} samples never go through the model "
            f"({', '.join(map(str, missing))})"
        )
        if missing == list(range(samples - samples % (PROCESSES * BATCH), samples)):
            raise Wrong(f"{lost}. Does the loader drop the last batches?", NO_PADDING)
        raise Wrong(f"{lost}. Does the loader drop samples, or is it split twice?", SPLITTING)


def judge_results(
    results: list[float | str],
    batches_by_rank: list[list[list[int]]],
    samples: int,
    mistakes: list[int],
    for_metrics: bool,
) -> None:
    """Check the results of all ranks. If a result is not a number, it is a description.

    `for_metrics` is True if the answer called `gather_for_metrics`.
    """
    numbers = [result for result in results if isinstance(result, float)]
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise Wrong(
                f"rank {rank} returns {result} instead of a number: every rank must return a number"
            )
    right = 1 - len(mistakes) / samples
    if max(numbers) - min(numbers) > TOLERANCE:
        different = f"the ranks return different numbers ({', '.join(f'{n:.4f}' for n in numbers)})"
        not_added = "The results of the ranks were not added up"
        read = [sum(batches, []) for batches in batches_by_rank]
        own = [accuracy_of(part, mistakes) for part in read]
        if all(abs(a - b) < TOLERANCE for a, b in zip(numbers, own, strict=True)):
            only = "each returns the accuracy of its own samples only"
            raise Wrong(f"{different}: {only}. {not_added}", MEANS)
        hits = sum(sample not in mistakes for sample in sum(read, []))  # including padding
        sums = (right, hits / samples, hits / len(sum(read, [])))
        if any(abs(sum(numbers) - total) < TOLERANCE for total in sums):
            raise Wrong(f"{different}. {not_added}", MEANS)
        raise Wrong(different)
    if abs(numbers[0] - right) < TOLERANCE:
        return
    wrong = f"for {samples} samples, it returns {numbers[0]:.4f} instead of {right:.4f}"
    for number, mistake, read in typical_mistakes(batches_by_rank, samples, mistakes, for_metrics):
        if abs(numbers[0] - number) < TOLERANCE:
            raise Wrong(f"{wrong}. {mistake}", read)
    raise Wrong(wrong)


def accuracy_of(part: list[int], mistakes: list[int]) -> float:
    """Return the accuracy of the model for these samples, or NaN if there are none."""
    right = sum(sample not in mistakes for sample in part)
    return right / len(part) if part else math.nan


def typical_mistakes(
    batches_by_rank: list[list[list[int]]], samples: int, mistakes: list[int], for_metrics: bool
) -> Iterator[tuple[float, str, str]]:
    """Yield (accuracy, message, section to read) for each typical mistake."""

    def mean(parts):
        accuracies = [accuracy_of(part, mistakes) for part in parts if part]
        return sum(accuracies) / len(accuracies) if accuracies else math.nan

    read = [sum(batches, []) for batches in batches_by_rank]
    everything = sum(read, [])
    right = sum(sample not in mistakes for sample in everything)
    unpadded, remaining = [], samples  # gathered batches without padding; samples not yet in them
    for index in range(max(map(len, batches_by_rank))):
        round_of_batches = [batches[index] for batches in batches_by_rank if index < len(batches)]
        unpadded.append(sum(round_of_batches, [])[:remaining])
        remaining -= len(unpadded[-1])
    padded = len(everything)
    if padded > samples:
        again = f"{padded - samples} samples were read again, as padding"
        not_removed, read_more = again, PADDING
        if for_metrics:
            read_more = COMMON
            not_removed += (
                ". gather_for_metrics removes padding only from the last batch of a prepared "
                "loader, when it is called in the loop with one prediction per sample"
            )
        yield (
            accuracy_of(everything[:samples], mistakes),
            f"It is the accuracy of the first {samples} gathered predictions, but the padding is "
            "not at the end: in which order do the ranks read the samples?",
            "The change",
        )
        yield right / padded, f"It counts {padded} predictions: {not_removed}", read_more
        yield (
            sum(sample not in mistakes for sample in sum(unpadded, [])) / padded,
            f"Only the divisor is wrong: it is {padded}, because {again}",
            PADDING,
        )
        yield (
            right / samples,
            f"The correct predictions are counted over {padded} samples: {not_removed}",
            read_more,
        )
    yield (
        PROCESSES * (1 - len(mistakes) / samples),
        f"It is {PROCESSES} times the accuracy: every rank's count was added more than once",
        MEANS,
    )
    of_ranks = [mean(batches) for batches in batches_by_rank if any(batches)]
    for accuracy, message in (
        (mean(unpadded), "It is a mean of the batches' accuracies, and the last batch is smaller"),
        (mean(read), "It is a mean of the ranks' accuracies, and some ranks have fewer samples"),
        (sum(of_ranks) / len(of_ranks), "It is a mean over ranks of means over batches"),
    ):
        yield accuracy, message, MEANS


if __name__ == "__main__":
    mistakes = {
        "stuck": Wrong(str(STUCK), NO_PADDING),
        "sizes_differ": Wrong("the ranks gathered tensors of different shapes", COMMON),
    }
    group = {"group_sizes": (PROCESSES,), "judge": judge, "patience": 30, **mistakes}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **group))

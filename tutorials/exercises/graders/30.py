"""Grade exercise 30: evaluate on three processes, and record which samples each model receives.

python tutorials/exercises/graders/30.py FILE
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from accel_demo.lab.grading import Wrong, grade, import_answer

PROCESSES, BATCH = 3, 5
# (number of samples, samples that the model misclassifies). A round of one batch per process has 15
# samples: 22 samples fill one round and part of another, 30 fill two rounds, and 4 fill no batch.
CASES = [(22, [0, 1, 2, 20]), (30, [3, 4, 27]), (4, [1])]
SIZES = ", ".join(str(samples) for samples, _ in CASES)
RIGHT = f"the exact accuracy of {SIZES} samples, on each of {PROCESSES} ranks"
TOLERANCE = 1e-6


def observe(answer: Path, device) -> Iterator[dict]:
    """For each case, yield the answer's result and the batches that the model received."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import GradientState

    from accel_demo.processes.connect import use_cpu

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

    module = import_answer(answer)
    for samples, mistakes in CASES:
        GradientState._reset_state()  # in case the last call did not read its loader to the end
        accelerator, model = Accelerator(cpu=use_cpu()), Model(mistakes)
        model.to(accelerator.device)
        inputs = torch.stack([torch.arange(samples), torch.ones(samples)], dim=1)
        dataset = torch.utils.data.TensorDataset(inputs, torch.arange(samples) % 3)
        with torch.no_grad():
            result = module.accuracy(accelerator, model, dataset, BATCH)
        try:
            result = float(result)
        except (TypeError, ValueError, RuntimeError):
            result = "nothing" if result is None else repr(result)[:80]
        yield {"result": result, "batches": model.batches}


def judge(number: int, seen: list[dict]) -> None:
    batches_by_rank = [observation["batches"] for observation in seen]
    judge_reading(batches_by_rank, CASES[number][0])
    judge_results([observation["result"] for observation in seen], batches_by_rank, *CASES[number])


def judge_reading(batches_by_rank: list[list[list[int]]], samples: int) -> None:
    read = [sum(batches, []) for batches in batches_by_rank]  # sample numbers, by rank
    share = math.ceil(samples / (PROCESSES * BATCH)) * BATCH  # samples per rank, including padding
    most = max(map(len, read))
    if most > share and sum(map(bool, read)) == 1:
        raise Wrong(
            f"one process does it all: {samples} samples go through the model on one rank, and "
            "none on the others. Prepare the loader on every rank, so that it is split among them"
        )
    if most > share:
        raise Wrong(
            f"the work is not shared: of {samples} samples {most} go through the model on one "
            f"rank, but {share} are enough. Prepare the loader, so that it is split among the ranks"
        )
    if missing := sorted(set(range(samples)) - set(sum(read, []))):
        raise Wrong(
            f"{len(missing)} of {samples} samples never go through the model "
            f"({', '.join(map(str, missing))}): do not use drop_last, and do not split a loader "
            "that is already split"
        )


def judge_results(
    results: list[float | str],
    batches_by_rank: list[list[list[int]]],
    samples: int,
    mistakes: list[int],
) -> None:
    """Check the results of all ranks. If a result is not a number, it is described by a string."""
    numbers = [result for result in results if isinstance(result, float)]
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise Wrong(
                f"rank {rank} returns {result} instead of a number: every rank must return a number"
            )
    if max(numbers) - min(numbers) > TOLERANCE:
        raise Wrong(
            f"the ranks return different numbers ({', '.join(f'{n:.4f}' for n in numbers)}): "
            "gather all predictions before you count"
        )
    right = 1 - len(mistakes) / samples
    if abs(numbers[0] - right) < TOLERANCE:
        return
    wrong = f"for {samples} samples it returns {numbers[0]:.4f} instead of {right:.4f}"
    for number, mistake in typical_mistakes(batches_by_rank, samples, mistakes):
        if abs(numbers[0] - number) < TOLERANCE:
            raise Wrong(f"{mistake} ({wrong})")
    raise Wrong(wrong)


def typical_mistakes(
    batches_by_rank: list[list[list[int]]], samples: int, mistakes: list[int]
) -> Iterator[tuple[float, str]]:
    """Yield the accuracy that each typical mistake leads to, and a message about the mistake."""

    def right(numbers):
        return sum(number not in mistakes for number in numbers)

    def mean(parts):
        return sum(right(part) / len(part) for part in parts if part) / sum(map(bool, parts))

    read = [sum(batches, []) for batches in batches_by_rank]
    everything = sum(read, [])
    cut, remaining = [], samples  # gathered batches without padding; samples not yet in `cut`
    for index in range(max(map(len, batches_by_rank))):
        round_of_batches = [batches[index] for batches in batches_by_rank if index < len(batches)]
        cut.append(sum(round_of_batches, [])[:remaining])
        remaining -= len(cut[-1])
    padded = len(everything)
    if padded > samples:
        yield (
            right(everything) / padded,
            f"padding is counted: {padded} samples instead of {samples}. gather_for_metrics "
            "removes it",
        )
        yield (
            right(sum(cut, [])) / padded,
            f"only the divisor is wrong: {padded}, including padding, instead of {samples}",
        )
        yield (
            right(everything) / samples,
            f"the right predictions of all {padded} samples, including padding, are divided by "
            f"{samples}",
        )
    yield (
        mean(cut),
        "it is a mean of the batches' accuracies, and the last batch is smaller: add up counts "
        "and divide once",
    )
    yield (
        mean(read),
        "it is a mean of the ranks' accuracies, and ranks have unequal numbers of samples: add up "
        "counts and divide once",
    )
    means = [mean(batches) for batches in batches_by_rank if batches]
    yield (
        sum(means) / len(means),
        "it is a mean of means, of batches and of ranks: add up all counts and divide once",
    )


if __name__ == "__main__":
    options = {"group_sizes": (PROCESSES,), "judge": judge}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **options))

"""Grade exercise 08: evaluate in three processes, and watch which samples the model gets to see.

python tutorials/exercises/graders/08.py FILE
"""

import argparse
import importlib.util
import json
import math
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from accel_demo.processes.launch import run_to_end

TIME_LIMIT = 150  # seconds; it takes under ten, and no collective waits longer than 60
PATIENCE = 20  # seconds that a rank which is done waits for the others
PROCESSES, BATCH = 3, 5
# How many samples, and which of them the model gets wrong. A padded round has 15: 22 need two of
# them, 30 fill them, and 4 are fewer than there are places in a batch.
CASES = [(22, [0, 1, 2, 20]), (30, [3, 4, 27]), (4, [1])]


def main(answer: Path) -> int:
    """Say what is wrong with the answer; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        files = f"{shlex.quote(str(answer))} --report {shlex.quote(folder)}"
        result = run_to_end(f"python tutorials/exercises/graders/08.py {files}", TIME_LIMIT)
        found = [Path(folder, f"{rank}.json") for rank in range(PROCESSES)]
        reports = [json.loads(file.read_text()) if file.exists() else None for file in found]
    if mistake := judge(reports, result.stderr):
        print(f"wrong: {mistake}")
        return 1
    sizes = ", ".join(str(samples) for samples, _ in CASES)
    print(f"right: the exact accuracy of {sizes} samples, on each of {PROCESSES} ranks")
    return 0


def judge(reports: list[dict | None], stderr: str = "") -> str:
    """What is wrong, in a sentence, or nothing. `reports` has one for each rank that wrote one."""
    done = [len(report["results"]) if report else 0 for report in reports]
    for number, (samples, mistakes) in enumerate(CASES[: min(done)]):
        read = [report["read"][number] for report in reports]
        results = [report["results"][number] for report in reports]
        mistake = judge_reading(read, samples) or judge_results(results, read, samples, mistakes)
        if mistake:
            return mistake
    if min(done) == len(CASES):
        return ""
    raised = [report for report in reports if report and report["mistake"]]
    if raised:  # the first: others may only have lost their partner
        return min(raised, key=lambda report: report["at"])["mistake"]
    if min(done) == max(done):
        return f"no rank came back from accuracy within {TIME_LIMIT} s, or all broke off\n{stderr}"
    lost = ", ".join(str(rank) for rank, cases in enumerate(done) if cases < max(done))
    return (
        f"rank {lost} does not come back from accuracy, though others do: it waits in a collective "
        "that not all ranks call"
    )


def judge_reading(read: list[list[list[int]]], samples: int) -> str:
    """`read` has, for each rank, the sample ids of each batch that went through the model."""
    own = [sum(batches, []) for batches in read]
    share = math.ceil(samples / (PROCESSES * BATCH)) * BATCH  # of one rank, padding and all
    if max(map(len, own)) > share:
        if sum(map(bool, own)) == 1:
            return (
                f"one process does it all: {samples} samples go through the model on one rank, and "
                "none on the others. Give each rank its part: prepare the loader, on every rank"
            )
        most = max(map(len, own))
        return (
            f"the work is not shared: of {samples} samples {most} go through the model on one "
            f"rank, where {share} would do. Prepare the loader, so that each rank gets its part"
        )
    if missing := sorted(set(range(samples)) - set(sum(own, []))):
        return (
            f"{len(missing)} of {samples} samples never go through the model "
            f"({', '.join(map(str, missing))}): without drop_last none is left out, and a loader "
            "that is split already must not be split again"
        )
    return ""


def judge_results(
    results: list, read: list[list[list[int]]], samples: int, mistakes: list[int]
) -> str:
    """`results` has what each rank has returned: a number, or in words what it was instead."""
    for rank, result in enumerate(results):
        if isinstance(result, str):
            return f"rank {rank} returns {result} instead of a number: every rank should have it"
    if max(results) - min(results) > 1e-6:
        numbers = ", ".join(f"{result:.4f}" for result in results)
        return (
            f"each rank returns a number of its own ({numbers}): gather the predictions of all "
            "before you count"
        )
    right = 1 - len(mistakes) / samples
    if abs(results[0] - right) < 1e-6:
        return ""
    for number, said in typical_mistakes(read, samples, mistakes):
        if abs(results[0] - number) < 1e-6:
            return (
                f"{said}. (For {samples} samples it gives {results[0]:.4f} instead of {right:.4f})"
            )
    return f"for {samples} samples it gives {results[0]:.4f} instead of {right:.4f}"


def typical_mistakes(read: list[list[list[int]]], samples: int, mistakes: list[int]):
    """Pairs: the number that a usual mistake gives, and how it is said."""

    def right(ids):
        return sum(sample not in mistakes for sample in ids)

    def mean(parts):
        return sum(right(part) / len(part) for part in parts) / len(parts)

    own = [sum(batches, []) for batches in read]
    everything = sum(own, [])
    rounds = [
        sum((batches[k] for batches in read if k < len(batches)), [])
        for k in range(max(map(len, read)))
    ]
    cut, left = [], samples  # as gather_for_metrics gives them: without what is more than samples
    for a_round in rounds:
        cut.append(a_round[:left])
        left -= len(cut[-1])
    padded = len(everything)
    if padded > samples:
        said = f"padding is counted: {padded} samples instead of {samples}"
        yield right(everything) / padded, f"{said}. gather_for_metrics drops it"
        said = f"only what is divided by is wrong: {padded}, the padding too, instead of {samples}"
        yield right(sum(cut, [])) / padded, said
        said = f"the right ones of all {padded} that were read, padding too, divided by {samples}"
        yield right(everything) / samples, said
    cut = [part for part in cut if part]
    said = "it is a mean of the batches' accuracies, and the last batch is smaller: add up counts"
    yield mean(cut), f"{said}, divide once"
    said = (
        "it is a mean of the ranks' accuracies, and ranks have unequal numbers of samples: add up"
    )
    yield mean([part for part in own if part]), f"{said} counts, divide once"
    means = [mean(batches) for batches in read if batches]
    said = "it is a mean of means, of batches and of ranks: add up counts over both, divide once"
    yield sum(means) / len(means), said


def observe(answer: str, note=lambda report: None) -> dict:
    """Call the answer on this rank: what it has returned, and what the model has got to see.

    `note` is called with what there is so far, after each case.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import GradientState

    from accel_demo.processes.connect import use_cpu

    class Model(torch.nn.Module):
        """It knows each sample, and is wrong where it should be."""

        def __init__(self, mistakes: list[int]):
            super().__init__()
            self.mistakes, self.batches = mistakes, []
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, inputs):
            ids = inputs[:, 0].round().int().tolist()
            self.batches.append(ids)
            said = [(sample % 3 + (sample in self.mistakes)) % 3 for sample in ids]
            return torch.nn.functional.one_hot(torch.tensor(said), 3).to(inputs) * self.scale

    report = {"mistake": "", "results": [], "read": [], "at": 0.0}
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for samples, mistakes in CASES:
            GradientState._reset_state()  # an iterator that was left early is forgotten
            accelerator, model = Accelerator(cpu=use_cpu()), Model(mistakes)
            model.to(accelerator.device)
            inputs = torch.stack([torch.arange(samples), torch.ones(samples)], dim=1)
            dataset = torch.utils.data.TensorDataset(inputs, torch.arange(samples) % 3)
            with torch.no_grad():
                result = module.accuracy(accelerator, model, dataset, BATCH)
            try:
                report["results"].append(float(result))
            except (TypeError, ValueError, RuntimeError):
                report["results"].append("nothing" if result is None else repr(result)[:80])
            report["read"].append(model.batches)
            note(report)
    except (Exception, SystemExit) as error:
        report["mistake"] = f"the file cannot be used: {type(error).__name__}: {error}"
        report["at"] = time.time()
        note(report)
    return report


def one_process(device, answer: str, folder: Path) -> None:
    """One process of the group: write down what it sees, and wait a while for the others."""
    import torch.distributed as dist

    file = folder / f"{dist.get_rank()}.json"

    def write(report: dict) -> None:
        file.with_suffix(".partial").write_text(json.dumps(report))
        file.with_suffix(".partial").rename(file)  # at once, so that nobody reads half of it

    if observe(answer, write)["mistake"]:
        os._exit(1)  # others may be waiting: let them know
    file.with_suffix(".done").touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("*.done"))) < PROCESSES:
        if time.monotonic() > deadline:
            os._exit(1)  # one of them waits for a collective that will not come: end it
        time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="evaluate, and write what was seen here")
    options = parser.parse_args()
    if options.report:
        from accel_demo.processes.group import run_in_group

        run_in_group(one_process, PROCESSES, options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))

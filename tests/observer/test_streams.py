"""Test what the audit and `accel-demo shards` see of streams in two processes, with workers too."""

import re

import pytest

from accel_demo.lab.audit.checks import batches, samples
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.shards.own import loaders_of
from accel_demo.lab.shards.tables import describe
from tests.conftest import run_to_end
from tests.observer.test_checks import observe

SCRIPT = """
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number, sample in enumerate(torch.arange(96.0).reshape(48, 2)):
            if {divide}:
                yield {sample}


loader = DataLoader(Stream(), 4, num_workers={workers})
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.0001)
if {dispatches} == "not prepared":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
else:
    configuration = DataLoaderConfiguration(dispatch_batches={dispatches})
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
DIVIDED = {
    "nothing": "True",
    "worker": "number % workers == worker",
    "rank": "number % RANKS == RANK",
    "both": "number % (RANKS * workers) == RANK * workers + worker",
}
NO, RANK_0, EACH_RANK = '"not prepared"', "None", "False"
RANKS = "100% of what a rank reads, another rank reads, too"
WORKERS = "The loader workers of a rank read the same samples"
TWICE = "The ranks' streams yield different samples, and Accelerate keeps only a part of each"
CASES = [  # divided by, workers, dispatch_batches: findings of `shards`, and of the audit
    ("both", 0, NO, [], []),
    ("both", 2, NO, [], []),
    ("nothing", 0, NO, [RANKS], ["The ranks read the same samples"]),
    ("worker", 2, NO, [RANKS], ["The ranks read the same samples"]),
    ("rank", 2, NO, [WORKERS], ["The loader workers of rank 0"]),
    ("nothing", 0, RANK_0, [], []),
    ("worker", 2, RANK_0, [], []),
    ("nothing", 2, RANK_0, [RANKS, WORKERS], ["The loader workers of rank 0"]),
    ("nothing", 0, EACH_RANK, [], []),
    ("worker", 2, EACH_RANK, [], []),
    ("nothing", 2, EACH_RANK, [WORKERS], ["The loader workers of rank 0"]),
    ("rank", 0, EACH_RANK, [TWICE], ["Accelerate divides this stream"]),
    ("both", 2, EACH_RANK, [TWICE], ["Accelerate divides this stream"]),
    ("both", 2, RANK_0, [], []),  # the streams of the other ranks are never read
]


def script(divided: str, workers: int, dispatches: str, sample: str = "sample") -> str:
    text = SCRIPT.replace("{divide}", DIVIDED[divided]).replace("{workers}", str(workers))
    return text.replace("{dispatches}", dispatches).replace("{sample}", sample)


def audited(evidence) -> list[str]:
    findings = []
    for check in (samples.check, batches.check):
        try:
            findings += [finding.sentence for finding in check(evidence)]
        except NotChecked:
            pass
    return findings


def matches(patterns: list[str], findings: list[str]) -> bool:
    pairs = zip(patterns, findings, strict=False)
    return len(patterns) == len(findings) and all(re.search(*pair) for pair in pairs)


@pytest.mark.parametrize(("divided", "workers", "dispatches", "by_shards", "by_audit"), CASES)
def test_wrong_streams_are_named_and_right_ones_are_not(
    divided, workers, dispatches, by_shards, by_audit, tmp_path
):
    text = script(divided, workers, dispatches)
    for name in ("shards", "audit"):
        (tmp_path / name).mkdir()
    limits = {"ACCEL_DEMO_AUDIT_EPOCHS": "2"}
    evidence = observe(text, tmp_path / "shards", **limits)
    assert [rank.connected_world for rank in evidence.ranks] == [2, 2]
    [loader] = loaders_of(evidence)
    assert matches(by_shards, loader.findings), loader.findings
    if workers and dispatches == NO:
        assert [len(counts) for counts in loader.by_worker] == [2, 2]
        assert sum(map(sum, loader.by_worker)) == 48 * (4 if divided == "nothing" else 1) * (
            2 if divided in ("worker", "rank") else 1
        )
        assert "samples by loader worker in epoch 1: rank 0: " in describe(loader)
    assert ("reads this loader on rank 0" in describe(loader)) == (dispatches == RANK_0)
    findings = audited(observe(text, tmp_path / "audit"))
    assert matches(by_audit, findings), findings


@pytest.mark.parametrize("sample", ["sample + torch.rand(2)", "sample * 0"])
def test_random_or_equal_elements_are_not_taken_for_another_stream(sample, tmp_path):
    evidence = observe(script("both", 0, EACH_RANK, sample), tmp_path)
    assert audited(evidence) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_different_numbers_of_batches_of_a_stream_are_found(workers, tmp_path):
    divide = "number % workers == worker and (12 <= number < 36 if RANK else number < 12)"
    text = script("both", workers, NO).replace(DIVIDED["both"], divide)
    [finding] = audited(observe(text, tmp_path))
    counts = "rank 0 has 4, rank 1 has 6" if workers else "rank 0 has 3, rank 1 has 6"
    assert finding.startswith(f"The ranks have different numbers of batches in pass 1: {counts}.")


@pytest.mark.slow
def test_three_processes_with_workers_are_counted_from_any_folder(tmp_path):
    for divided, samples_of_worker in (("both", 8), ("worker", 24)):
        (tmp_path / f"{divided}.py").write_text(script(divided, 2, NO))
        command = "accel-demo shards -- torchrun --nproc-per-node 3".split()
        ended = run_to_end([*command, f"{divided}.py"], cwd=tmp_path)
        assert ended.returncode == (divided == "worker"), ended.stderr
        assert "3 connected processes" in ended.stdout
        counts = f"{samples_of_worker}, {samples_of_worker}"
        ranks = "; ".join(f"rank {rank}: {counts}" for rank in range(3))
        assert f"samples by loader worker in epoch 1: {ranks}\n" in ended.stdout
        assert ("100% of what a rank reads" in ended.stdout) == (divided == "worker")

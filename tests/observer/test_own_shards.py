"""Test that `accel-demo shards` shows what the loaders of any script return."""

import json
import re

import pytest

from accel_demo.errors import UserError
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observation import Observation
from accel_demo.lab.observed.ranks import Rank
from accel_demo.lab.shards.command import main
from accel_demo.lab.shards.own import loaders_of
from accel_demo.lab.shards.result import readers_of
from accel_demo.lab.shards.tables import describe, reading_table
from tests.conftest import REPOSITORY, run_to_end
from tests.observer.test_checks import observe

SCRIPTS = REPOSITORY / "tutorials/pitfalls"
WRONG = {  # a pitfall: what is said of its training loader
    "same_samples": "16 samples are read more than once",
    "no_set_epoch": "each epoch has the same order",
    "loader_divided_twice": "8 samples are never read, .* into 4 parts for 2 processes",
    "loader_not_prepared": "16 samples are read more than once",
    "stream_read_twice": "100% of what a rank reads, another rank reads, too",
    "stream_divided_twice": "The ranks' streams yield different samples",
    "stream_workers": "The loader workers of a rank read the same samples",
}
QUICK = "loader_divided_twice", "stream_workers"  # run by default
EACH = [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in WRONG]
# Accelerate reads a stream on rank 0 only, and sends each rank its part.
DISPATCHED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(12.0).reshape(12, 1)

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), 2))
for epoch in range(5):
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


UNEVEN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
samples = torch.arange(9.0).reshape(9, 1)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in DataLoader(samples, 3, sampler=range(dist.get_rank(), 9, 2)):
    model(batch).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


ENDLESS = """
import itertools
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        for number in itertools.count(dist.get_rank(), 2):
            yield torch.tensor([float(number)])

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.0)
for batch in DataLoader(Stream(), 2):
    model(batch).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def loaders_in(script: str, folder):
    evidence = observe(script, folder, ACCEL_DEMO_AUDIT_EPOCHS="3")
    assert [rank.connected_world for rank in evidence.ranks] == [2, 2]
    return loaders_of(evidence)


@pytest.mark.parametrize("name", EACH)
def test_what_is_wrong_with_a_loader_is_said_of_the_broken_script_only(name, tmp_path):
    for version in ("broken", "fixed"):
        folder = tmp_path / version
        folder.mkdir()
        loaders = loaders_in((SCRIPTS / f"{name}_{version}.py").read_text(), folder)
        findings = [finding for loader in loaders for finding in loader.findings]
        assert len(findings) == (version == "broken"), findings
        assert re.search(WRONG[name], "".join(findings)) or version == "fixed", findings


def test_a_stream_that_accelerate_divides_is_shown_as_the_ranks_get_it(tmp_path):
    [loader] = loaders_in(DISPATCHED, tmp_path)
    assert loader.trains and loader.by_content and loader.findings == []
    assert loader.name.endswith(":15 for batch in loader:")
    assert loader.samples == 12 and len(loader.epochs) == 3  # the run ends after three of five
    for epoch in loader.epochs:
        readers = readers_of(epoch.batches, 12)
        assert sorted(rank for ranks in readers for rank in ranks) == [0] * 6 + [1] * 6
        assert epoch.more_than_once == [] and epoch.never is None


def test_ranks_with_batches_of_different_sizes_are_named(tmp_path):
    [loader] = loaders_in(UNEVEN, tmp_path)
    assert loader.epochs[0].batches == [[[0, 2, 4], [6, 8]], [[1, 3, 5], [7]]]
    [finding] = loader.findings
    assert finding.startswith("Batch 2 has 2, 1 samples by rank.")


def test_the_command_prints_a_map_for_each_loader_of_a_script(tmp_path):
    script = REPOSITORY / "tutorials/51_ddp.py"
    command = ["accel-demo", "shards", "--json", "out.json", "--plot", "out.svg"]
    command += ["--guess", "0", script]
    ended = run_to_end(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 connected processes" in ended.stdout
    assert len(re.findall(r"`[01]{64}`", ended.stdout)) == 2
    assert "17 samples (told apart by content" in ended.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["subject"], result["findings"]) == ("script", [])
    assert "Your guess is right" in ended.stdout, "no sample of the training set is read twice"
    assert [loader["trains"] for loader in result["loaders"]] == [True, False]
    assert "51_ddp.py:" in (tmp_path / "out.svg").read_text()


def events_of(epochs: list[list], samples: int | None, loader: int = 0, **about) -> list[dict]:
    """Return what a rank records that trains with these batches, lists of indices, per epoch.

    Without `samples`, the numbers are the contents of a stream.
    """
    line = {"loader": loader, "line": [__file__, 1, "main"], "samples": samples, "identity": 1}
    settings = {"sampler": "Own", "replacement": False, "shuffle": False, "divided_by": []}
    events = []
    for number, batches in enumerate(epochs):
        key = {"loader": loader, "number": number}
        events.append({"kind": "pass", **line, **key, **settings, **about})
        for batch in batches:
            indices = None if samples is None else batch
            events.append({"kind": "batch", **key, "indices": indices, "samples": [batch]})
            events += [{"kind": "backward"}, {"kind": "step", "optimizer": 0}]
        whole = {"batches": len(batches), "whole": len(batches)}
        events.append({"kind": "pass end", **key, **whole})
    return events


def loaders_of_two(read, samples: int | None, epochs: int = 3, **about) -> list:
    """Return the loaders of two ranks. `read(rank, epoch)` returns the batches."""
    ranks = []
    for number in range(2):
        batches = [read(number, epoch) for epoch in range(epochs)]
        events = events_of(batches, samples, **about)
        events += [{"kind": "connected", "world": 2, "rank": number}]
        ranks.append(Rank(number, number, 2, [each | {"time": 0.0} for each in events]))
    return loaders_of(Evidence(ranks, 0))


def in_batches(ids: list[int], size: int = 4) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def quarter(rank: int, epoch: int) -> list[list[int]]:
    return in_batches(list(range(rank, 64, 4)))


def test_samples_that_no_epoch_reads_are_named_if_no_other_loader_reads_them():
    [loader] = loaders_of_two(quarter, 64)
    assert loader.findings == ["The same 32 samples of 64 are not read in any epoch."]
    assert loaders_of_two(quarter, 64, epochs=1)[0].findings == []
    assert loaders_of_two(quarter, 64, sampler="SubsetRandomSampler")[0].findings == []
    shifted = loaders_of_two(lambda rank, epoch: in_batches(range(rank + epoch, 64, 4)), 64)
    assert shifted[0].findings == []  # each epoch misses others
    events = events_of([quarter(0, 0)] * 2, 64) + events_of([quarter(2, 0)] * 2, 64, loader=1)
    ranks = [Rank(n, n, 2, [each | {"time": 0.0} for each in events]) for n in range(2)]
    assert not any(
        "any epoch" in text for each in loaders_of(Evidence(ranks, 0)) for text in each.findings
    )


def test_what_a_stream_does_not_contain_is_unknown():
    [loader] = loaders_of_two(quarter, None)
    assert loader.by_content and [epoch.never for epoch in loader.epochs] == [None] * 3
    assert reading_table([loader]).count("unknown") == 3


def test_equal_rows_of_a_table_are_not_taken_for_samples_read_twice():
    def rows(rank, epoch):
        return in_batches([100 * (i * 7 % 5) + i // 3 % 4 for i in range(rank, 256, 2)], 8)

    assert loaders_of_two(rows, None)[0].findings == []
    [loader] = loaders_of_two(lambda rank, epoch: in_batches(range(64)), None)
    assert loader.findings == ["100% of what a rank reads, another rank reads, too."]


def test_a_sampler_that_repeats_samples_on_a_rank_has_a_replacement():
    def balanced(rank, epoch):
        return in_batches([(i * i + epoch) % 64 for i in range(rank, 64, 2)], 8)

    [loader] = loaders_of_two(balanced, 64)
    assert len(loader.epochs[0].more_than_once) > 8 and loader.findings == []
    [loader] = loaders_of_two(lambda rank, epoch: in_batches(range(64)), 64)
    assert "64 samples are read more than once" in loader.findings[0]


def test_a_stream_without_an_end_is_read_in_part(tmp_path):
    evidence = observe(ENDLESS, tmp_path, ACCEL_DEMO_AUDIT_EPOCHS="3", ACCEL_DEMO_AUDIT_BATCHES="5")
    [loader] = loaders_of(evidence)
    assert evidence.exit_code == 0 and loader.ended_after == 5
    assert [len(batches) for batches in loader.epochs[0].batches] == [5, 5]
    assert not loader.epochs[0].is_complete and loader.findings == []
    assert "of the first 5 batches of a rank: the others were not read" in describe(loader)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--samples 5 SCRIPT", "--samples is only for our loaders"),
        ("--samples=22 SCRIPT", "--samples is only for our loaders"),
        ("--no-shuffle -- python SCRIPT", "--no-shuffle is only for our loaders"),
        ("--gpu", "--gpu is only for your script"),
        ("none.py", "there is no file none.py"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.replace("SCRIPT", __file__).split())


@pytest.mark.parametrize(
    "kind, message",
    [
        ("lost", "events of rank 0 were lost"),
        ("step", "has read no samples from a DataLoader, and has ended with exit code 3: no data"),
    ],
)
def test_a_script_that_shows_no_samples_is_an_error_of_one_line(kind, message, monkeypatch):
    rank = Rank(1, 0, 1, [{"kind": kind, "time": 0.0}])
    seen = Observation(Evidence([rank], 3, "epoch 1\nno data\n"), [], {}, [])
    monkeypatch.setattr("accel_demo.lab.shards.command.observe", lambda *_: seen)
    with pytest.raises(UserError, match=message):
        main([__file__])

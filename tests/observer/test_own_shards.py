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
from accel_demo.lab.shards.reading import readers_of
from tests.conftest import REPOSITORY, run_to_end
from tests.observer.test_checks import observe

SCRIPTS = REPOSITORY / "tutorials/pitfalls"
WRONG = {  # a pitfall: what is said of its training loader
    "same_samples": "16 samples are read more than once",
    "no_set_epoch": "each epoch has the same order",
    "loader_divided_twice": "8 samples are never read, .* into 4 parts for 2 processes",
    "loader_not_prepared": "16 samples are read more than once",
    "stream_read_twice": "100% of what a rank reads, another rank reads, too",
    "stream_workers": "Each sample is read at least 2 times",
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
        assert epoch.more_than_once == epoch.never == []


def test_ranks_with_batches_of_different_sizes_are_named(tmp_path):
    [loader] = loaders_in(UNEVEN, tmp_path)
    assert loader.epochs[0].batches == [[[0, 2, 4], [6, 8]], [[1, 3, 5], [7]]]
    [finding] = loader.findings
    assert finding.startswith("Batch 2 has 2, 1 samples by rank.")


def test_the_command_prints_a_map_for_each_loader_of_a_script(tmp_path):
    script = REPOSITORY / "tutorials/51_ddp.py"
    command = ["accel-demo", "shards", "--json", "out.json", "--plot", "out.svg", script]
    ended = run_to_end(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 connected processes" in ended.stdout
    assert len(re.findall(r"`[01]{64}`", ended.stdout)) == 2
    assert "16 samples (told apart by content" in ended.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert [loader["trains"] for loader in result["loaders"]] == [True, False]
    assert "51_ddp.py:" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--samples 5 SCRIPT", "--samples is about our own loaders"),
        ("--no-shuffle -- python SCRIPT", "--no-shuffle is about our own loaders"),
        ("--gpu", "--gpu is about your own script"),
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

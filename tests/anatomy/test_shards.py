"""Whoever deals the samples out decides which rank reads which."""

import pytest

from accel_demo.anatomy import shards
from accel_demo.anatomy.shards import WAYS, in_words, who_reads_what
from accel_demo.errors import one_line_errors
from accel_demo.processes.environment import rank_environment

AT_LEAST = "--samples must be at least {}, a batch of 2 for each process ({})"
SIZES = [(samples, batch_size) for samples in (6, 7, 11, 12, 16, 29) for batch_size in (1, 2)]


def deal():
    """What this rank reads in two epochs, in each way, for each of the sizes."""
    found = {}
    for way in WAYS:
        for samples, batch_size in SIZES:
            for epoch in (0, 1):
                batches = who_reads_what(way, samples, batch_size, epoch)
                found[way, samples, batch_size, epoch] = batches
    with pytest.raises(ValueError, match="^way must be one of"):
        who_reads_what("by chance", 8, 2)
    return found


@pytest.fixture(scope="module")
def dealt(together):
    return {world_size: together(deal, world_size) for world_size in (1, 3)}


def of_ranks(dealt, world_size, key):
    return [found[key] for found in dealt[world_size]]


def keys(dealt, way):
    for world_size, ranks in dealt.items():
        for key in ranks[0]:
            if key[0] == way:
                yield world_size, key


@pytest.mark.parametrize("way", WAYS)
def test_the_ranks_read_disjoint_parts_that_cover_the_epoch_but_for_the_padding(dealt, way):
    pads = way in ("DistributedSampler", "Accelerate")
    for world_size, key in keys(dealt, way):
        _, samples, batch_size, _ = key
        ranks = of_ranks(dealt, world_size, key)
        assert len({len(batches) for batches in ranks}) == 1  # or some would wait for the others
        read = [sample for batches in ranks for batch in batches for sample in batch]
        unit = world_size * (1 if way == "DistributedSampler" else batch_size)
        if pads:
            assert set(read) == set(range(samples)) and len(read) - samples < unit
        else:
            assert len(set(read)) == len(read) == samples // unit * unit


@pytest.mark.parametrize("way", WAYS)
def test_each_epoch_has_an_order_of_its_own(dealt, way):
    for world_size, (_, samples, batch_size, epoch) in keys(dealt, way):
        if samples > 7:
            this = of_ranks(dealt, world_size, (way, samples, batch_size, epoch))
            assert this != of_ranks(dealt, world_size, (way, samples, batch_size, 1 - epoch))


def test_the_raw_file_deals_as_accelerate_and_torchs_sampler_does_not(dealt):
    for world_size, (_, *size) in keys(dealt, "train_ddp.py"):
        ours = of_ranks(dealt, world_size, ("train_ddp.py", *size))
        assert ours == of_ranks(dealt, world_size, ("Accelerate, drop_last", *size))
        if world_size > 1 and size[1] > 1:
            assert ours != of_ranks(dealt, world_size, ("DistributedSampler", *size))


def test_it_is_said_in_words_what_was_read():
    assert in_words([[[0, 1]], [[2, 3]]], 4) == "each once"
    assert in_words([[[0, 1]], [[2, 0]]], 4) == "1 twice, 1 not at all"
    assert in_words([[[0, 1]], [[0, 0]]], 2) == "1 twice or more"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--samples 3", f"{AT_LEAST.format(4, 2)}, got 3"),
        ("--processes -1", "--processes must be at least 1, got -1"),
    ],
)
def test_what_cannot_be_dealt_gets_one_line(capsys, flags, said):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        shards.main(flags.split())
    assert (stopped.value.code, *capsys.readouterr()) == (2, "", f"error: {said}\n")


def test_in_a_launch_its_own_processes_count(start, capsys, monkeypatch):
    module = ["-m", "accel_demo.anatomy.shards", "--samples", "3"]
    shown = start(["torchrun", "--standalone", "--nproc-per-node", 1, *module])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("1 connected process on cpu (gloo)\n")
    for name, value in rank_environment(0, 4, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        shards.main(["--samples", "5"])
    said = f"error: {AT_LEAST.format(8, 4)}, got 5\n"
    assert (stopped.value.code, *capsys.readouterr()) == (2, "", said)
